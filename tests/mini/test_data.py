"""The generated data sets on disk: videos, tables, and how they get there."""

import json
import os
import shutil
from pathlib import Path

import av
import datasets
import numpy as np
import pytest

from tests.minidata import SEED, SIZES, tiny_corpus, tiny_root
from windowquant.errors import UserError
from windowquant.mini import data, render
from windowquant.mini.corpus import TASKS, Sizes, Table, build, fingerprint
from windowquant.mini.render import Drawings
from windowquant.mini.scenes import CONTENTS, PLACES, Scene, Story
from windowquant.mini.video import encoder, write_mp4

MEANS = (
    102.8, 66.6, 153.9, 220.4, 49.4, 133.7, 128.4, 80.8, 136.8, 165.4, 137.5, 56.6,
    139.3, 119.0, 102.3, 96.2, 113.4, 77.8, 161.7, 220.0, 51.9, 140.5, 127.0, 89.4,
)  # fmt: skip
ONE = Sizes(videos=1, per_task=1, egoschema=0)


def decode(path: Path) -> np.ndarray:
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def instant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Videos as empty files, for tests of everything else."""
    monkeypatch.setattr(data, "write_mp4", lambda frames, path, fps: path.write_bytes(b""))
    monkeypatch.setattr(data, "frames", lambda *_: np.zeros(0))


# ---- videos


@pytest.mark.parametrize("task", TASKS)
def test_every_row_has_its_video_of_96_frames(task: str) -> None:
    rows = datasets.load_from_disk(tiny_root() / "datasets" / task)["test"]
    for name in {str(name) for name in rows[data.VIDEO_COLUMNS[task]]}:
        with av.open(str(tiny_root() / data.VIDEO_FOLDERS[task] / f"{name}.mp4")) as container:
            stream = container.streams.video[0]
            assert (stream.frames, stream.width, stream.height, stream.average_rate) == (96, 256, 256, 8)
            assert stream.pix_fmt == "yuv420p" and stream.duration * stream.time_base == 12
            assert sum(1 for _ in container.decode(stream)) == 96


@pytest.mark.parametrize("task", ["nextqa", "egoschema"])
def test_videos_show_the_places_of_the_story(task: str) -> None:
    centre = {place: (np.array(top) + np.array(bottom)) / 2 for place, (top, bottom, _) in render._LOOKS.items()}
    for video in tiny_corpus()[task].videos:
        pixels = decode(tiny_root() / data.VIDEO_FOLDERS[task] / f"{video.name}.mp4")
        medians = np.median(pixels.reshape(96, -1, 3), axis=1) / 255
        nearest = [min(PLACES, key=lambda p: np.abs(centre[p] - colour).sum()) for colour in medians]
        told = [s.place for s, n in zip(video.story.scenes, video.story.lengths, strict=True) for _ in range(n)]
        assert np.mean([a == b for a, b in zip(nearest, told, strict=True)]) >= 0.9


def test_videos_are_the_held_out_drawings() -> None:
    video = tiny_corpus()["nextqa"].videos[0]
    pixels = decode(tiny_root() / data.VIDEO_FOLDERS["nextqa"] / f"{video.name}.mp4").astype(float)
    held_out, training = (render.frames(video.story, Drawings(held), video.seed, 256) for held in (True, False))
    assert np.abs(pixels - held_out).mean() < 3 < np.abs(pixels - training).mean()


def test_tasks_share_one_copy_of_a_video() -> None:
    name = tiny_corpus()["nextqa"].videos[1].name
    paths = [tiny_root() / data.VIDEO_FOLDERS[task] / f"{name}.mp4" for task in ("nextqa", "intentqa", "describe")]
    assert len({path.stat().st_ino for path in paths}) == 1


def test_a_file_system_without_links_gets_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no links here")

    instant(monkeypatch)
    monkeypatch.setattr(os, "link", refuse)
    root = data.ensure(tmp_path / "data", 0, ONE)
    assert len(list(root.rglob("*.mp4"))) == 3


@pytest.mark.parametrize("codec", [None, "mpeg4"])
def test_both_encoders_keep_frames_and_colours(codec: str | None, tmp_path: Path) -> None:
    story = Story((Scene("sea", "wave"), Scene("market", "ball"), Scene("snow", "three")), (4, 4, 4))
    frames = render.frames(story, Drawings(True), 0, 128)
    write_mp4(frames, tmp_path / "v.mp4", 8, codec)
    error = np.abs(decode(tmp_path / "v.mp4").astype(float) - frames)
    assert error.mean() < 3
    assert error.mean(axis=(1, 2, 3)).max() < 4


def test_without_x264_the_encoder_is_mpeg4(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str, mode: str) -> None:
        raise av.codec.codec.UnknownCodecError(name)

    monkeypatch.setattr(av, "Codec", unknown)
    assert encoder.__wrapped__() == "mpeg4"


# ---- drawings


@pytest.mark.parametrize("content", CONTENTS)
def test_held_out_drawings_are_not_those_of_training(content: str) -> None:
    training, held_out = (
        {render.mask(content, Drawings(held), seed).tobytes() for seed in range(40)} for held in (False, True)
    )
    assert not training & held_out


@pytest.mark.parametrize("number", range(10))
def test_no_handwritten_digit_is_both_trained_on_and_held_out(number: int) -> None:
    training, held_out = ({d.tobytes() for d in render._digits(held)[number]} for held in (False, True))
    assert training and held_out and not training & held_out


def test_the_drawings_are_those_of_this_generator_version() -> None:
    """When this fails the videos have changed: raise GENERATOR_VERSION, so that data on disk are made anew."""
    scenes = tuple(Scene(PLACES[k % len(PLACES)], content) for k, content in enumerate(CONTENTS))
    frames = render.frames(Story(scenes, (1,) * len(scenes)), Drawings(True), 5, 64)
    assert data.GENERATOR_VERSION == 1
    means = frames.mean(axis=(1, 2, 3))
    assert np.allclose(means, MEANS, atol=0.3), means.round(1).tolist()


# ---- tables


INT, TEXT = "int64", "string"
ANSWERS = {f"a{k}": TEXT for k in range(5)}
ABOUT = {"frame_count": INT, "width": INT, "height": INT, "question": TEXT, "answer": INT, "qid": INT, "type": TEXT}
SCHEMAS = {
    "nextqa": {"video": INT, **ABOUT, **ANSWERS},
    "intentqa": {"video_id": INT, **ABOUT, **ANSWERS, "action": TEXT, "lemma": TEXT, "lemma_id": INT},
    "egoschema": {"question_idx": TEXT, "question": TEXT, "video_idx": TEXT, "option": [TEXT], "answer": TEXT},
    "describe": {"video": INT, "question": TEXT, "answer": TEXT},
}


@pytest.mark.parametrize("task", TASKS)
def test_tables_have_the_published_schema(task: str) -> None:
    table = datasets.load_from_disk(tiny_root() / "datasets" / task)
    assert list(table) == ["test"]
    features = {
        name: [feature.feature.dtype] if hasattr(feature, "feature") else feature.dtype
        for name, feature in table["test"].features.items()
    }
    assert features == SCHEMAS[task]
    assert table["test"].to_list() == list(tiny_corpus()[task].rows)


def test_the_manifest_names_the_data() -> None:
    manifest = json.loads((tiny_root() / "manifest.json").read_text())
    assert manifest["fingerprint"] == fingerprint(tiny_corpus())
    assert manifest["seed"] == SEED and manifest["encoder"] == encoder()
    for task, table in tiny_corpus().items():
        about = {"fingerprint": table.fingerprint(), "videos": len(table.videos), "questions": len(table.rows)}
        assert manifest["tasks"][task] == about


# ---- getting there


def test_data_that_are_there_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "_generate", lambda *_: pytest.fail("generated again"))
    assert data.ensure(tiny_root(), SEED, SIZES) == tiny_root()


def test_other_data_of_the_generator_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    instant(monkeypatch)
    root = data.ensure(tmp_path / "data", 0, ONE)
    before = sorted(root.rglob("*.mp4"))
    assert data.ensure(root, 1, ONE) == root
    after = sorted(root.rglob("*.mp4"))
    assert len(before) == len(after) == 3 and not set(before) & set(after)
    assert [path for path in tmp_path.iterdir() if not path.name.endswith(".lock")] == [root]


@pytest.mark.parametrize("content", [None, "not json", '{"fingerprint": "0"}', '["list"]'])
def test_a_folder_with_anything_else_is_refused(content: str | None, tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("keep me")
    if content is not None:
        (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(UserError, match="something other than generated data"):
        data.ensure(tmp_path, 0, ONE)
    assert (tmp_path / "precious.txt").read_text() == "keep me"


def test_an_interrupted_run_leaves_nothing_and_the_next_one_completes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    instant(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(data, "_write_table", interrupt)
        with pytest.raises(KeyboardInterrupt):
            data.ensure(tmp_path / "data", 0, ONE)
    assert not [path for path in tmp_path.iterdir() if not path.name.endswith(".lock")]
    (tmp_path / ".data.new").mkdir()  # what a killed run would leave
    assert (data.ensure(tmp_path / "data", 0, ONE) / "manifest.json").is_file()
    assert not (tmp_path / ".data.new").exists()


def test_an_empty_folder_is_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    instant(monkeypatch)
    assert data.ensure(tmp_path, 0, ONE) == tmp_path
    assert (tmp_path / "manifest.json").is_file()
    shutil.rmtree(tmp_path)


def test_the_folder_is_the_environments_or_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    instant(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("WINDOWQUANT_DATA", raising=False)
    name = f"mini-{fingerprint(build(0, ONE))[:8]}"
    assert data.ensure(None, 0, ONE) == tmp_path / "cache" / "windowquant" / name
    monkeypatch.setenv("WINDOWQUANT_DATA", str(tmp_path / "mine"))
    assert data.ensure(None, 0, ONE) == tmp_path / "mine"


def test_a_folder_that_cannot_be_written_is_told_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write .*WINDOWQUANT_DATA"):
        data.ensure(tmp_path / "file" / "data", 0, ONE)


def test_the_command_prints_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def small(seed: int, sizes: Sizes | None) -> dict[str, Table]:
        return build(seed, ONE)

    instant(monkeypatch)
    monkeypatch.setattr(data, "build", small)
    assert data.main(["--root", str(tmp_path / "data"), "--seed", "5"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "data")
    assert json.loads((tmp_path / "data" / "manifest.json").read_text())["seed"] == 5
    (tmp_path / "file").write_text("")
    assert data.main(["--root", str(tmp_path / "file" / "data")]) == 2
    told = capsys.readouterr().err.strip()
    assert told.startswith("cannot write") and "\n" not in told
