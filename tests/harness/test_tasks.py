"""Our own lmms-eval tasks, and lmms-eval's, on the generated data."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.minidata import tiny_corpus, tiny_root
from windowquant.errors import UserError
from windowquant.harness import tasks
from windowquant.harness.tasks.describe import utils as describe
from windowquant.harness.tasks.intentqa import utils as intentqa
from windowquant.mini import scenes as sc

FOLDER = Path(tasks.__file__).parent
OWN = {"intentqa": "windowquant_intentqa", "describe": "windowquant_describe"}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HF_HOME", str(tiny_root()))
    monkeypatch.chdir(tiny_root())  # the tasks' own dataset_path is relative
    yield


def own_task(task: str, **changes: Any) -> Any:
    from lmms_eval.api.task import ConfigurableMessagesTask
    from lmms_eval.utils import load_yaml_config

    config = load_yaml_config(str(FOLDER / task / f"{task}.yaml"), mode="full") | changes
    return ConfigurableMessagesTask(config=config, model_name="any")


def question_of(row: dict[str, Any]) -> sc.Question:
    options = tuple(row[f"a{k}"] for k in range(5)) if "a0" in row else tuple(o[3:] for o in row.get("option", ()))
    return sc.Question("", row["question"], options, -1, "", ())


def true_reply(row: dict[str, Any]) -> str:
    answer = int(row["answer"])
    return f"{question_of(row).options[answer]} ({sc.LETTERS[answer]})"


# ---- as lmms-eval sees them


def test_lmms_eval_finds_both_tasks_in_the_folder() -> None:
    from lmms_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(FOLDER), include_defaults=False)
    assert set(OWN.values()) <= set(manager.all_tasks)


@pytest.mark.parametrize("task", OWN)
def test_prompts_are_what_the_model_was_trained_on(task: str) -> None:
    built = own_task(task)
    rows = list(built.test_docs())
    assert [built.doc_to_text(row) for row in rows] == [sc.prompt(question_of(row), task) for row in rows]
    assert len(rows) == len(tiny_corpus()[task].rows)


@pytest.mark.parametrize("task", OWN)
def test_messages_hold_the_video_then_the_prompt(task: str) -> None:
    built = own_task(task)
    for row in built.test_docs():
        (message,) = built.doc_to_messages(row)
        video, text = message["content"]
        assert video["type"] == "video" and Path(video["url"]).is_file()
        assert text == {"type": "text", "text": sc.prompt(question_of(row), task)}


def test_intentqa_scores_the_true_reply_and_no_other() -> None:
    built = own_task("intentqa")
    for row in built.test_docs():
        assert built.process_results(row, [true_reply(row)]) == {"exact_match": True}
        assert built.doc_to_target(row) == row["answer"]
        for k in {0, 1, 2, 3, 4} - {row["answer"]}:
            assert built.process_results(row, [f"{row[f'a{k}']} ({sc.LETTERS[k]})"]) == {"exact_match": False}


def test_describe_scores_the_true_reply() -> None:
    built = own_task("describe")
    for row in built.test_docs():
        assert built.process_results(row, [built.doc_to_target(row)]) == {"scenes_in_order": 1.0}
        assert built.process_results(row, [""]) == {"scenes_in_order": 0.0}


def test_lmms_evals_own_tasks_read_nextqa_and_egoschema() -> None:
    from lmms_eval.tasks.egoschema import utils as egoschema

    nextqa = intentqa._nextqa()
    for row in tiny_corpus()["nextqa"].rows:
        assert nextqa.nextqa_doc_to_text_mc(row) == sc.prompt(question_of(row), "nextqa")
        assert nextqa.nextqa_mc_process_results(row, [true_reply(row)]) == {"exact_match": True}
    for row in tiny_corpus()["egoschema"].rows:
        assert egoschema.egoschema_doc_to_text(row) == sc.prompt(question_of(row), "egoschema")
        scores = egoschema.egoschema_process_results_generation(row, [true_reply(row)])["score"]
        assert str(scores["pred"]) == scores["ground_truth"] == row["answer"]


def test_both_parsers_read_every_reply_that_is_trained() -> None:
    """No reply is left to the parsers' random letter or read as another one."""
    from lmms_eval.tasks.egoschema import utils as egoschema

    nextqa, letters, rng = intentqa._nextqa(), list(sc.LETTERS), np.random.default_rng(4)
    for _ in range(60):
        story, mainly = sc.sample_story(rng), sc.sample_story(rng, main=str(rng.choice(sc.CONTENTS)))
        asked = [sc.ask(mix, story, rng) for mix in (sc.NEXTQA_MIX, sc.INTENTQA_MIX)] + [sc.ask_main(mainly, rng)]
        for question in asked:
            right, texts = letters[question.answer], dict(zip(letters, question.options, strict=True))
            assert nextqa.parse_multi_choice_response(question.reply, letters, texts) == right
            assert egoschema.parse_multi_choice_response(question.reply, letters, texts)[0] == right


# ---- the real IntentQA


def test_intentqa_reads_the_released_csv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = "video_id,frame_count,width,height,question,answer,qid,type,a0,a1,a2,a3,a4,action,lemma,lemma_id"
    row = "7000000001,300,640,360,why did the girl stop,3,4,CW,tired,hungry,to wave,to look,lost,stop,stop,17"
    table = tmp_path / "test.csv"
    table.write_bytes(f"{columns}\r\n{row}\r\n".encode())
    videos = tmp_path / "intentqa" / "Videos"
    videos.mkdir(parents=True)
    (videos / "7000000001.mp4").write_bytes(b"")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("LMMS_EVAL_DATASETS_CACHE", str(tmp_path / "cache"))
    built = own_task("intentqa", dataset_path="csv", dataset_kwargs={"data_files": {"test": str(table)}})
    (doc,) = built.test_docs()
    options = "A. tired\nB. hungry\nC. to wave\nD. to look\nE. lost"
    assert built.doc_to_text(doc) == f"why did the girl stop\n{options}"
    assert built.doc_to_visual(doc) == [str(videos / "7000000001.mp4")]
    assert built.process_results(doc, ["D. to look"]) == {"exact_match": True}
    built.lmms_eval_specific_kwargs = {"post_prompt": "\nAnswer with the letter."}
    assert built.doc_to_text(doc).endswith("E. lost\nAnswer with the letter.")


@pytest.mark.parametrize(
    ("module", "folder", "doc"),
    [(intentqa, "intentqa/Videos", {"video_id": 5}), (describe, "describe/videos", {"video": 5})],
)
def test_videos_are_looked_for_where_hf_home_points_now(
    module: Any, folder: str, doc: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(UserError, match=r"5\.mp4 is missing"):
        module.doc_to_visual(doc)
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / "5.MP4").write_bytes(b"")
    assert module.doc_to_visual(doc) == [str(tmp_path / folder / "5.MP4")]


def test_without_hf_home_the_usual_cache_is_looked_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(UserError, match=str(tmp_path / ".cache" / "huggingface" / "describe")):
        describe.doc_to_visual({"video": 5})


def test_loading_needs_neither_network_nor_hf_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the network was asked for")

    monkeypatch.delenv("HF_HOME")
    monkeypatch.delitem(sys.modules, "lmms_eval.tasks.nextqa.utils", raising=False)
    monkeypatch.setattr("nltk.download", refuse)
    for name in ("socket.socket.connect", "socket.create_connection", "socket.getaddrinfo"):
        monkeypatch.setattr(name, refuse)
    module = intentqa._nextqa.__wrapped__()
    row = {"question": "why", "answer": 1, **{f"a{k}": f"w{k}" for k in range(5)}}
    assert module.nextqa_mc_process_results(row, ["(B)"]) == {"exact_match": True}
    assert "HF_HOME" not in os.environ


# ---- the score of `describe`


def common(a: list[str], b: list[str]) -> int:
    """Longest common subsequence by its definition."""
    if not a or not b:
        return 0
    if a[0] == b[0]:
        return 1 + common(a[1:], b[1:])
    return max(common(a[1:], b), common(a, b[1:]))


scene_lists = st.lists(st.sampled_from(["sea wave", "lake ball", "sea ball", "cave two"]), max_size=6)


@settings(deadline=None)
@given(said=scene_lists, right=scene_lists)
def test_scenes_in_order_is_the_common_subsequence_over_the_longer_list(said: list[str], right: list[str]) -> None:
    expected = common(said, right) / max(len(said), len(right), 1)
    assert describe.scenes_in_order(", ".join(said), ", ".join(right)) == expected


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("sea wave, lake ball, cave two", 1),
        ("Sea wave,lake  ball,\ncave two.", 1),
        ("sea wave, lake ball, cave two,", 1),
        ("sea wave, lake ball", 2 / 3),
        ("sea wave, lake ball, cave two, cave two", 3 / 4),
        ("lake ball, sea wave, cave two", 2 / 3),
        ("sea, lake, cave", 0),
        ("sea wave lake ball cave two", 0),
        ("", 0),
        (" , ,", 0),
    ],
)
def test_scenes_in_order_by_example(reply: str, score: float) -> None:
    assert describe.scenes_in_order(reply, "sea wave, lake ball, cave two") == score
