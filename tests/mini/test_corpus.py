"""Stories, questions and rows of the generated data sets, without drawing anything."""

import json
import re
from collections import Counter
from functools import cache
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.minidata import is_right
from windowquant.mini import corpus as corpora
from windowquant.mini.corpus import TASKS, Sizes, build, fingerprint
from windowquant.mini.scenes import ACTIONS, FRAMES, NUMBERS, OBJECTS

ASKED = ("nextqa", "intentqa", "egoschema")
SMALL = Sizes(videos=3, per_task=2, egoschema=2)
full = cache(build)  # of the default sizes, by seed
KEY = {"nextqa": "video", "intentqa": "video_id", "egoschema": "video_idx", "describe": "video"}


def options_of(task: str, row: dict) -> list[str]:
    if task == "egoschema":
        return [option.split(". ")[1] for option in row["option"]]
    return [row[f"a{k}"] for k in range(5)]


def story_of(table: corpora.Table, task: str, row: dict):
    (video,) = [v for v in table.videos if v.name == str(row[KEY[task]])]
    return video.story


@given(seed=st.integers(0, 2**31))
@settings(max_examples=15, deadline=None)
def test_the_answer_is_right_and_no_other_option_is(seed: int) -> None:
    for task, table in build(seed, SMALL).items():
        for row in table.rows if task in ASKED else ():
            story, options = story_of(table, task, row), options_of(task, row)
            right = [k for k, option in enumerate(options) if is_right(story, row["question"], option)]
            assert right == [int(row["answer"])], (task, row, story)


@pytest.mark.parametrize("task", ASKED)
def test_options_are_told_apart_by_their_last_word(task: str) -> None:
    for row in full()[task].rows:
        assert len({option.split()[-1] for option in options_of(task, row)}) == 5


def test_describe_lists_every_scene_in_order() -> None:
    for row, video in zip(full()["describe"].rows, full()["describe"].videos, strict=True):
        assert row["answer"].split(", ") == [f"{s.place} {s.content}" for s in video.story.scenes]


def test_answers_spread_over_the_letters() -> None:
    answers = Counter(int(row["answer"]) for seed in range(3) for task in ASKED for row in full(seed)[task].rows)
    shares = [answers[k] / answers.total() for k in range(5)]
    assert answers.total() == 3 * 260
    assert all(0.15 < share < 0.25 for share in shares), shares


@pytest.mark.parametrize("seed", range(3))
def test_stories_fit_the_video(seed: int) -> None:
    for table in full(seed).values():
        for video in table.videos:
            places = [scene.place for scene in video.story.scenes]
            assert 8 <= len(places) == len(set(places)) <= 14
            assert sum(video.story.lengths) == FRAMES
            assert all(length >= 4 for length in video.story.lengths)


@pytest.mark.parametrize("seed", range(3))
def test_what_a_long_video_is_mainly_about_leads_clearly(seed: int) -> None:
    for video in full(seed)["egoschema"].videos:
        frames: Counter[str] = Counter()
        for scene, length in zip(video.story.scenes, video.story.lengths, strict=True):
            frames[scene.content] += length
        (_, first), (_, second) = frames.most_common(2)
        assert first >= 1.5 * second and 0.4 * FRAMES <= first <= 0.75 * FRAMES


def test_nextqa_rows_have_the_published_columns() -> None:
    names = "video frame_count width height question answer qid type a0 a1 a2 a3 a4"
    for row in full()["nextqa"].rows:
        assert list(row) == names.split()
        assert 2**31 < row["video"] < 2**34  # more than 32 bits, as the real ids
        assert (row["frame_count"], row["width"], row["height"]) == (96, 256, 256)
        assert type(row["answer"]) is int and row["type"] in {"CW", "CH", "TN", "TP", "TC"}
        assert re.fullmatch(r"[a-z ]+", row["question"])


def test_intentqa_rows_have_the_published_columns() -> None:
    names = "video_id frame_count width height question answer qid type a0 a1 a2 a3 a4 action lemma lemma_id"
    for row in full()["intentqa"].rows:
        assert list(row) == names.split()
        assert row["type"] in {"CW", "CH", "TN", "TP"}
        assert row["action"] in row["question"].split() and row["lemma"] == row["action"]
        assert 0 <= row["lemma_id"] < 162


def test_egoschema_rows_have_the_published_columns() -> None:
    rows = full()["egoschema"].rows
    for k, row in enumerate(rows):
        assert list(row) == ["question_idx", "question", "video_idx", "option", "answer"]
        assert row["question_idx"] == f"{k:05d}"
        assert str(UUID(row["video_idx"])) == row["video_idx"] and len(row["video_idx"]) == 36
        assert [option[:3] for option in row["option"]] == ["A. ", "B. ", "C. ", "D. ", "E. "]
        assert row["answer"] in set("01234")
    assert len({row["video_idx"] for row in rows}) == len(rows)


@pytest.mark.parametrize("task", ["nextqa", "intentqa"])
def test_questions_about_one_video_differ(task: str) -> None:
    asked: dict[int, list[dict]] = {}
    for row in full()[task].rows:
        asked.setdefault(row[KEY[task]], []).append(row)
    assert len(asked) == 25
    for rows in asked.values():
        assert [row["qid"] for row in rows] == [0, 1, 2, 3]
        assert len({row["question"] for row in rows}) == 4


def test_every_kind_of_question_and_content_occurs() -> None:
    tables = full()
    assert {row["type"] for row in tables["nextqa"].rows} == {"CW", "TN", "TP", "TC"}
    assert {row["type"] for row in tables["intentqa"].rows} == {"CW", "CH", "TN"}
    for kind in (ACTIONS, OBJECTS, NUMBERS):
        assert any(options_of("egoschema", row)[0] in kind for row in tables["egoschema"].rows)


def test_the_same_seed_gives_the_same_data_and_another_one_others() -> None:
    assert build(3, SMALL) == build(3, SMALL)
    prints = {seed: {t: build(seed, SMALL)[t].fingerprint() for t in TASKS} for seed in (3, 4)}
    assert all(prints[3][task] != prints[4][task] for task in TASKS)
    assert len(set(prints[3].values())) == 4


def test_a_larger_corpus_begins_with_the_smaller_one() -> None:
    small, large = build(3, SMALL), build(3, Sizes(videos=5, per_task=3, egoschema=4))
    for task in ("nextqa", "egoschema", "describe"):
        rows = len(small[task].rows)
        assert large[task].rows[:rows] == small[task].rows and len(large[task].rows) > rows


def test_the_fingerprint_covers_generator_stories_and_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = build(0, SMALL)
    before, table = fingerprint(tables), tables["nextqa"]
    changed = [
        corpora.Table(table.videos[::-1], table.rows, table.evidence),
        corpora.Table(table.videos, table.rows[:-1], table.evidence),
        corpora.Table(table.videos, table.rows, table.evidence[:-1]),
    ]
    assert all(fingerprint({**tables, "nextqa": other}) != before for other in changed)
    monkeypatch.setattr(corpora, "GENERATOR_VERSION", corpora.GENERATOR_VERSION + 1)
    assert fingerprint(tables) != before


def test_evidence_is_the_scenes_that_hold_the_answer() -> None:
    for task, table in full().items():
        for row, intervals in zip(table.rows, table.evidence, strict=True):
            story = story_of(table, task, row)
            ends = [sum(story.lengths[: k + 1]) for k in range(len(story.lengths))]
            scenes = [ends.index(end) for start, end in intervals]
            assert [(ends[k] - story.lengths[k], ends[k]) for k in scenes] == intervals
            shown = {word for k in scenes for word in str(story.scenes[k]).split()}
            if task == "describe":
                assert len(scenes) == len(ends)
            else:
                right = options_of(task, row)[int(row["answer"])]
                assert set(right.removeprefix("to ").split()) <= shown
                assert task == "egoschema" or row["question"].split()[-1] in shown


def test_rows_are_plain_json() -> None:
    rows = [row for table in build(0, SMALL).values() for row in table.rows]
    assert json.loads(json.dumps(rows)) == rows
