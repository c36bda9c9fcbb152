"""The held-out mini data sets as stories and table rows, in the published schemas of the benchmarks they stand for.

Nothing is drawn or written here (`data` does that): a corpus is a pure function of a seed and of the sizes, and its
fingerprint names it. NExT-QA and IntentQA ask about videos of one collection (as the real ones do); `describe` has all
of that collection, EgoSchema its own videos.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any
from uuid import UUID

import numpy as np

from windowquant.mini import scenes as sc

GENERATOR_VERSION = 1  # raise it when the drawings change: stories and tables are covered by the fingerprint itself
SIDE = 256
FPS = 8
HELD_OUT = 0x57514844  # first word of every seed sequence here; training never uses it
TASKS = ("nextqa", "egoschema", "intentqa", "describe")

_STORIES, _MAIN_STORIES, _NEXTQA, _INTENTQA, _EGOSCHEMA = range(5)
QUESTIONS = 4  # of each video that NExT-QA or IntentQA asks about
_FIRST_ID, _ID_STEP = 2_400_000_000, 100_000_000  # NExT-QA's ids reach past 32 bits
_VERBS = {"CW": "go", "CH": "spend", "TN": "want"}  # the verb that each kind of IntentQA question asks about
_LEMMAS = tuple(_VERBS.values())
_MAIN_SHARE, _MAIN_LEAD = 0.75, 1.5

Intervals = list[tuple[int, int]]


@dataclass(frozen=True)
class Sizes:
    """How much to generate: `videos` in the shared collection, of which NExT-QA asks about the first `per_task` and
    IntentQA about the last."""

    videos: int = 40
    per_task: int = 25
    egoschema: int = 60


@dataclass(frozen=True)
class Video:
    """One video: the file's stem, what it shows, and the seed of its drawings."""

    name: str
    story: sc.Story
    seed: int


@dataclass(frozen=True)
class Table:
    """One data set: its videos, its rows in the published schema, and for each row the frame intervals [start, end)
    that hold the answer."""

    videos: tuple[Video, ...]
    rows: tuple[dict[str, Any], ...]
    evidence: tuple[Intervals, ...]

    def fingerprint(self) -> str:
        """sha256 over the generator version, the videos' stories and seeds, and the rows (not the mp4 bytes, which
        depend on the codec's build)."""
        parts = [GENERATOR_VERSION, SIDE, FPS, [asdict(v) for v in self.videos], self.rows, self.evidence]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def build(seed: int = 0, sizes: Sizes | None = None) -> dict[str, Table]:
    """All four data sets by task name. Each video has a random stream of its own, so a larger corpus begins with the
    smaller one's videos."""
    sizes = sizes or Sizes()
    shared = [_shared_video(seed, k) for k in range(sizes.videos)]
    mainly = [_main_video(seed, k) for k in range(sizes.egoschema)]
    first, last = shared[: sizes.per_task], shared[-sizes.per_task :]
    return {
        "nextqa": _table(first, _asker(sc.NEXTQA_MIX, seed, _NEXTQA), _nextqa_row),
        "egoschema": _table(mainly, lambda k, v: [sc.ask_main(v.story, _rng(seed, _EGOSCHEMA, k))], _egoschema_row),
        "intentqa": _table(last, _asker(sc.INTENTQA_MIX, seed, _INTENTQA), _intentqa_row),
        "describe": _table(shared, lambda k, v: [sc.describe(v.story)], _describe_row),
    }


def fingerprint(corpus: dict[str, Table]) -> str:
    """sha256 of the data sets' fingerprints."""
    return hashlib.sha256(" ".join(corpus[task].fingerprint() for task in TASKS).encode()).hexdigest()


@dataclass(frozen=True)
class _Asked:
    """A question in its place: number of the row, video, number among the video's questions."""

    index: int
    video: Video
    qid: int
    question: sc.Question


_Ask = Callable[[int, Video], list[sc.Question]]


def _rng(seed: int, stream: int, index: int) -> np.random.Generator:
    return np.random.default_rng([HELD_OUT, seed, stream, index])


def _shared_video(seed: int, index: int) -> Video:
    rng = _rng(seed, _STORIES, index)
    story = sc.sample_story(rng)
    while not any(scene.content in sc.ACTIONS for scene in story.scenes):  # IntentQA asks what the man does
        story = sc.sample_story(rng)
    name = _FIRST_ID + index * _ID_STEP + int(rng.integers(_ID_STEP))
    return Video(str(name), story, int(rng.integers(2**31)))


def _main_video(seed: int, index: int) -> Video:
    rng = _rng(seed, _MAIN_STORIES, index)
    kind = str(rng.choice(list(sc.KINDS), p=[sc.KIND_SHARES[k] for k in sc.KINDS]))
    main = str(rng.choice(sc.KINDS[kind]))
    story = sc.sample_story(rng, main=main)
    while not _is_mainly(story, main):
        story = sc.sample_story(rng, main=main)
    name = UUID(bytes=rng.bytes(16), version=4)
    return Video(str(name), story, int(rng.integers(2**31)))


def _is_mainly(story: sc.Story, main: str) -> bool:
    """Whether the content leads clearly without filling nearly the whole video (the question would ask nothing)."""
    frames: Counter[str] = Counter()
    for scene, length in zip(story.scenes, story.lengths, strict=True):
        frames[scene.content] += length
    rival = max((n for content, n in frames.items() if content != main), default=0)
    return frames[main] <= _MAIN_SHARE * sc.FRAMES and frames[main] >= _MAIN_LEAD * rival


def _asker(mix: Sequence[tuple], seed: int, stream: int) -> _Ask:
    """Asks QUESTIONS questions of a mix about each video, no two in the same words."""

    def ask(index: int, video: Video) -> list[sc.Question]:
        rng, questions = _rng(seed, stream, index), dict[str, sc.Question]()
        while len(questions) < QUESTIONS:
            question = sc.ask(mix, video.story, rng)
            questions.setdefault(question.text, question)
        return list(questions.values())

    return ask


def _intervals(story: sc.Story, evidence: Sequence[int]) -> Intervals:
    starts = np.cumsum([0, *story.lengths]).tolist()
    return [(starts[k], starts[k + 1]) for k in sorted(evidence)]


def _table(videos: Sequence[Video], ask: _Ask, row: Callable[[_Asked], dict[str, Any]]) -> Table:
    asked: list[_Asked] = []
    for k, video in enumerate(videos):
        for qid, question in enumerate(ask(k, video)):
            asked.append(_Asked(len(asked), video, qid, question))
    evidence = tuple(_intervals(a.video.story, a.question.evidence) for a in asked)
    return Table(tuple(videos), tuple(row(a) for a in asked), evidence)


def _size() -> dict[str, int]:
    return {"frame_count": sc.FRAMES, "width": SIDE, "height": SIDE}


def _choices(asked: _Asked) -> dict[str, Any]:
    question = asked.question
    return {
        "question": question.text,
        "answer": question.answer,
        "qid": asked.qid,
        "type": question.kind,
        **{f"a{k}": option for k, option in enumerate(question.options)},
    }


def _nextqa_row(asked: _Asked) -> dict[str, Any]:
    return {"video": int(asked.video.name), **_size(), **_choices(asked)}


def _intentqa_row(asked: _Asked) -> dict[str, Any]:
    verb = _VERBS[asked.question.kind]
    lemma = {"action": verb, "lemma": verb, "lemma_id": _LEMMAS.index(verb)}
    return {"video_id": int(asked.video.name), **_size(), **_choices(asked), **lemma}


def _egoschema_row(asked: _Asked) -> dict[str, Any]:
    question = asked.question
    return {
        "question_idx": f"{asked.index:05d}",
        "question": question.text,
        "video_idx": asked.video.name,
        "option": [f"{letter}. {option}" for letter, option in zip(sc.LETTERS, question.options, strict=True)],
        "answer": str(question.answer),
    }


def _describe_row(asked: _Asked) -> dict[str, Any]:
    return {"video": int(asked.video.name), "question": asked.question.text, "answer": asked.question.reply}
