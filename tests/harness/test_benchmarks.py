"""Benchmarks on local data: found, read by lmms-eval's own code, and complained about where something is missing."""

import shutil
from pathlib import Path

import pytest

from tests.tiny import write_data
from windowquant.errors import UserError
from windowquant.harness import environment
from windowquant.harness.benchmarks import BENCHMARKS, benchmark, build_task, check_videos
from windowquant.harness.data import Data, open_data
from windowquant.harness.lmms_model import FAILED
from windowquant.harness.settings import DataSettings


@pytest.mark.parametrize(
    ("task", "name", "metric"),
    [("nextqa", "nextqa_mc_test", "exact_match"), ("egoschema", "egoschema_subset", "score")],
)
def test_stock_tasks_read_local_data(tiny_data: Path, task: str, name: str, metric: str) -> None:
    data = open_data(DataSettings("local", str(tiny_data)))
    environment.prepare(data.root)
    built = build_task(task, data)
    assert (built.config.task, built.metric, len(built.eval_docs)) == (name, metric, 4)
    (message,) = built.doc_to_messages(built.eval_docs[0])
    video, text = message["content"]
    assert Path(video["url"]).is_file()
    assert str(tiny_data) in video["url"]
    assert "A. to eat" in text["text"]


def test_data_of_another_folder_are_not_mixed_up(tiny_data: Path, tmp_path: Path) -> None:
    """The task code is executed again for each folder: no path and no row of an earlier one stays behind."""
    other = write_data(tmp_path / "other", questions=3)
    for root, rows in ((tiny_data, 4), (other, 3)):
        data = open_data(DataSettings("local", str(root)))
        environment.prepare(data.root)
        task = build_task("egoschema", data)
        assert len(task.eval_docs) == rows
        assert str(root) in task.doc_to_visual(task.eval_docs[0])[0]


def test_a_failed_document_is_in_no_score(tiny_data: Path) -> None:
    task = build_task("nextqa", Data("local", tiny_data))
    row = task.eval_docs[1]
    assert task.process_results(row, [FAILED]) == {}
    assert task.process_results(row, ["to rest (B)"]) == {"exact_match": True}


def test_an_unknown_task_is_told_with_the_known_ones() -> None:
    with pytest.raises(UserError, match="Unknown task 'mvbench': the known ones are nextqa, egoschema"):
        benchmark("mvbench")


def test_unknown_data_are_told_with_the_known_ones() -> None:
    with pytest.raises(UserError, match="Unknown data 'cloud': the known ones are mini, hub, local"):
        open_data(DataSettings("cloud"))


def test_a_missing_data_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"Data folder .*nowhere does not exist"):
        open_data(DataSettings("local", str(tmp_path / "nowhere")))
    with pytest.raises(UserError, match=r"data=local needs a folder"):
        open_data(DataSettings("local"))


def test_a_missing_table_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"Table .*datasets/nextqa is missing"):
        Data("local", tmp_path).table("nextqa")


def test_a_missing_video_is_named_before_anything_runs(tmp_path: Path) -> None:
    data = Data("local", write_data(tmp_path))
    rows = build_task("nextqa", data).eval_docs
    check_videos("nextqa", data, rows)
    (tmp_path / "nextqa/NExTVideo/9000000001.mp4").unlink()
    with pytest.raises(UserError, match=r"Video .*9000000001\.mp4 is missing"):
        check_videos("nextqa", data, rows)
    check_videos("nextqa", data, rows.select([0]))
    shutil.rmtree(tmp_path / "nextqa/NExTVideo")
    with pytest.raises(UserError, match=r"Video folder .*NExTVideo does not exist"):
        check_videos("nextqa", data, rows)


def test_fingerprints_follow_the_data(tmp_path: Path, tiny_data: Path) -> None:
    assert Data("local", tiny_data).fingerprint("nextqa") == "tinydata"
    one, two = (write_data(tmp_path / name, questions=count) for name, count in (("one", 2), ("two", 3)))
    for root in (one, two):
        (root / "manifest.json").unlink()
    prints = {Data("local", root).fingerprint(task) for root in (one, two) for task in ("nextqa", "egoschema")}
    assert len(prints) == 4
    assert Data("hub", None).fingerprint("nextqa") == "hub"


def test_task_files_are_there() -> None:
    assert [spec.task for spec in BENCHMARKS.values() if not spec.yaml.is_file()] == []


def test_downloaded_videos_are_looked_for_where_lmms_eval_puts_them(
    tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = build_task("nextqa", Data("local", tiny_data)).eval_docs
    monkeypatch.setenv("HF_HOME", str(tiny_data))
    check_videos("nextqa", Data("hub", None), rows)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(UserError, match=r"Video folder .*nextqa/NExTVideo does not exist"):
        check_videos("nextqa", Data("hub", None), rows)


def test_data_that_cannot_be_downloaded_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: object, **__: object) -> None:
        raise ConnectionError("no network\nat all")

    monkeypatch.setattr("windowquant.harness.benchmarks.CountedTask", offline)
    with pytest.raises(
        UserError, match=r"data of nextqa cannot be loaded \(no network at all\): check network and login"
    ):
        build_task("nextqa", Data("hub", None))
    with pytest.raises(UserError, match="The hub has no copy of intentqa"):
        build_task("intentqa", Data("hub", None))


def test_a_damaged_table_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_data(tmp_path)
    (root / "datasets/nextqa/test/data-00000-of-00001.arrow").write_bytes(b"no table")
    environment.prepare(root)
    monkeypatch.setattr("tenacity.nap.time.sleep", lambda _: None)  # lmms-eval tries five times
    with pytest.raises(UserError, match=r"The data of nextqa cannot be loaded .*check .*datasets/nextqa"):
        build_task("nextqa", Data("local", root))
