"""The world of the mini data sets: places, contents, stories, and the questions asked of them.

A story is a list of scenes; a scene is a place in which one content is seen: an action of a stick figure, a drifting
object, or a handwritten number.
Everything here is text and indices; `render` turns it into frames.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

PLACES = (
    "sea", "forest", "desert", "snow", "space", "lawn", "street", "barn",
    "beach", "garden", "lake", "cave", "market", "library", "temple", "swamp",
)  # fmt: skip
ACTIONS = ("wave", "cheer", "sit", "sleep", "run", "bow", "balance", "tumble")
OBJECTS = ("ball", "star", "kite", "ring", "box", "flag")
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
CONTENTS = ACTIONS + OBJECTS + NUMBERS
KINDS = {"action": ACTIONS, "object": OBJECTS, "number": NUMBERS}
KIND_OF = {content: kind for kind, contents in KINDS.items() for content in contents}
KIND_SHARES = {"action": 0.5, "object": 0.2, "number": 0.3}
LETTERS = "ABCDE"

FRAMES = 96
MIN_SCENE_FRAMES = 4
EGOSCHEMA_POST_PROMPT = "\nAnswer with the option's letter from the given choices directly."
DESCRIBE_PROMPT = "list the scenes in order"

_CURRENT = {
    "action": "what is the man doing in the {}",
    "object": "which object moves in the {}",
    "number": "which number is written in the {}",
}
_MAIN = {
    "action": "what does c mainly do in the long video",
    "object": "which object is the long video mainly about",
    "number": "which number is the long video mainly about",
}


@dataclass(frozen=True)
class Scene:
    place: str
    content: str

    def __str__(self) -> str:
        return f"{self.place} {self.content}"


@dataclass(frozen=True)
class Story:
    """Scenes in order, and how many frames each takes (they sum to the video's frames)."""

    scenes: tuple[Scene, ...]
    lengths: tuple[int, ...]

    def scene_of_frame(self) -> np.ndarray:
        """[frames] int: the index of each frame's scene."""
        return np.repeat(np.arange(len(self.scenes)), self.lengths)


@dataclass(frozen=True)
class Question:
    """One question of a story. `options` is empty and `answer` is -1 for an open question; `evidence` are the scenes
    that hold the answer."""

    kind: str
    text: str
    options: tuple[str, ...]
    answer: int
    reply: str
    evidence: tuple[int, ...]


def _lengths(count: int, frames: int, rng: np.random.Generator) -> tuple[int, ...]:
    cells = frames // MIN_SCENE_FRAMES
    cuts = np.sort(rng.permutation(np.arange(1, cells))[: count - 1]) * MIN_SCENE_FRAMES
    return tuple(np.diff([0, *cuts, frames]).tolist())


def _content(rng: np.random.Generator) -> str:
    kind = rng.choice(list(KIND_SHARES), p=list(KIND_SHARES.values()))
    return str(rng.choice(KINDS[str(kind)]))


def sample_story(
    rng: np.random.Generator, scenes: tuple[int, int] = (8, 14), frames: int = FRAMES, main: str | None = None
) -> Story:
    """A random story; no place comes twice. With `main`, that content fills about half of the video or more, in
    several scenes where it can."""
    count = int(rng.integers(scenes[0], scenes[1] + 1))
    places = rng.permutation(len(PLACES))[:count]
    lengths = _lengths(count, frames, rng)
    contents = [_content(rng) for _ in range(count)]
    if main is not None:
        chosen = _most_of(lengths, rng.uniform(0.45, 0.65) * frames, 0.75 * frames, rng)
        contents = [main if k in chosen else _other(c, main, rng) for k, c in enumerate(contents)]
    return Story(tuple(Scene(PLACES[p], c) for p, c in zip(places, contents, strict=True)), lengths)


def _most_of(lengths: Sequence[int], least: float, most: float, rng: np.random.Generator) -> set[int]:
    """Random scenes that take at least `least` frames together, and not more than `most` where that can be had."""
    chosen: set[int] = set()
    covered = 0
    order = rng.permutation(len(lengths))
    for k in sorted(order, key=lambda k: lengths[k] > most - least):
        if covered < least and covered + lengths[k] <= most:
            chosen.add(int(k))
            covered += lengths[k]
    return chosen or {int(np.argmax(lengths))}


def _other(content: str, main: str, rng: np.random.Generator) -> str:
    """A content that differs from the main one, of the main one's kind half of the time (a question needs rivals)."""
    if rng.random() < 0.5:
        content = str(rng.choice(KINDS[KIND_OF[main]]))
    while content == main:
        content = str(rng.choice(KINDS[KIND_OF[main]]))
    return content


def _choose(
    kind: str,
    text: str,
    right: str,
    wrong: Sequence[str],
    evidence: Sequence[int],
    rng: np.random.Generator,
    said: str | None = None,
) -> Question:
    """A question with its options shuffled. The reply is what is said (by default the right option) and the option's
    letter."""
    texts = [right, *wrong]
    order = rng.permutation(len(texts))
    answer = int(np.flatnonzero(order == 0)[0])
    options = tuple(texts[k] for k in order)
    return Question(kind, text, options, answer, f"{said or right} ({LETTERS[answer]})", tuple(evidence))


def _rivals(story: Story, right: str, pool: Sequence[str], rng: np.random.Generator) -> list[str]:
    """Four wrong options from the pool: those that the video shows first, so that the video must be read in the right
    place."""
    seen = {w for s in story.scenes for w in (s.place, s.content)}
    candidates = [pool[k] for k in rng.permutation(len(pool)) if pool[k] != right]
    return sorted(candidates, key=lambda c: c not in seen)[:4]


def _scene_rivals(story: Story, right: int, asked: int, rng: np.random.Generator) -> list[str]:
    """Four other scenes, of the video where it has them, with contents that differ from each other (an option is
    known by its last word)."""
    used = {story.scenes[right].content}
    rivals: list[str] = []
    pool = [story.scenes[k] for k in rng.permutation(len(story.scenes)) if k not in (right, asked)]
    pool += [Scene(PLACES[p], _content(rng)) for p in rng.permutation(len(PLACES)) for _ in range(4)]
    for scene in pool:
        taken = {story.scenes[right].place, *(r.split()[0] for r in rivals)}
        if scene.content not in used and scene.place not in taken and len(rivals) < 4:
            used.add(scene.content)
            rivals.append(str(scene))
    return rivals


def ask_current(story: Story, rng: np.random.Generator) -> Question:
    """TC: what is seen in a place."""
    k = int(rng.integers(len(story.scenes)))
    scene = story.scenes[k]
    kind = KIND_OF[scene.content]
    rivals = _rivals(story, scene.content, KINDS[kind], rng)
    return _choose("TC", _CURRENT[kind].format(scene.place), scene.content, rivals, [k], rng, str(scene))


def ask_next(story: Story, rng: np.random.Generator) -> Question:
    """TN: which scene follows a place."""
    k = int(rng.integers(len(story.scenes) - 1))
    text = f"which scene comes after the {story.scenes[k].place}"
    said = f"{story.scenes[k]}, {story.scenes[k + 1]}"
    return _choose("TN", text, str(story.scenes[k + 1]), _scene_rivals(story, k + 1, k, rng), [k, k + 1], rng, said)


def ask_previous(story: Story, rng: np.random.Generator) -> Question:
    """TP: which scene comes before a place."""
    k = int(rng.integers(1, len(story.scenes)))
    text = f"which scene comes before the {story.scenes[k].place}"
    said = f"{story.scenes[k]} after {story.scenes[k - 1]}"
    return _choose("TP", text, str(story.scenes[k - 1]), _scene_rivals(story, k - 1, k, rng), [k - 1, k], rng, said)


def _an_action(story: Story, rng: np.random.Generator) -> int | None:
    acting = [k for k, s in enumerate(story.scenes) if s.content in ACTIONS]
    return int(rng.choice(acting)) if acting else None


def ask_why(story: Story, rng: np.random.Generator) -> Question:
    """CW: what the man went to a place for."""
    k = _an_action(story, rng)
    if k is None:
        return ask_current(story, rng)
    scene = story.scenes[k]
    wrong = [f"to {w}" for w in _rivals(story, scene.content, ACTIONS, rng)]
    text = f"why did the man go to the {scene.place}"
    return _choose("CW", text, f"to {scene.content}", wrong, [k], rng, str(scene))


def ask_how(story: Story, rng: np.random.Generator) -> Question:
    """CH: how the man spends his time in a place."""
    k = _an_action(story, rng)
    if k is None:
        return ask_current(story, rng)
    scene = story.scenes[k]
    text = f"how does the man spend his time in the {scene.place}"
    return _choose("CH", text, scene.content, _rivals(story, scene.content, ACTIONS, rng), [k], rng, str(scene))


def ask_intended_place(story: Story, rng: np.random.Generator) -> Question:
    """TN of IntentQA: where the man wants to go next."""
    k = int(rng.integers(len(story.scenes) - 1))
    right = story.scenes[k + 1].place
    pool = [p for p in PLACES if p != story.scenes[k].place]
    text = f"where does the man want to go after the {story.scenes[k].place}"
    said = f"{story.scenes[k]}, {right}"
    return _choose("TN", text, right, _rivals(story, right, pool, rng), [k, k + 1], rng, said)


def ask_main(story: Story, rng: np.random.Generator) -> Question:
    """EgoSchema: what most of the video shows (the story must have a main content)."""
    frames: dict[str, int] = {}
    for scene, length in zip(story.scenes, story.lengths, strict=True):
        frames[scene.content] = frames.get(scene.content, 0) + length
    right = max(frames, key=lambda c: frames[c])
    kind = KIND_OF[right]
    evidence = [k for k, s in enumerate(story.scenes) if s.content == right]
    return _choose("MAIN", _MAIN[kind], right, _rivals(story, right, KINDS[kind], rng), evidence, rng)


def describe(story: Story) -> Question:
    """The long answer: every scene in order."""
    reply = ", ".join(map(str, story.scenes))
    return Question("DESCRIBE", DESCRIBE_PROMPT, (), -1, reply, tuple(range(len(story.scenes))))


# as rare as in the release: of its multiple-choice test questions 16 % ask what comes next and 1 % what came before
NEXTQA_MIX = ((ask_current, 0.38), (ask_why, 0.4), (ask_next, 0.2), (ask_previous, 0.02))
INTENTQA_MIX = ((ask_why, 0.5), (ask_how, 0.2), (ask_intended_place, 0.3))


def ask(mix: Sequence[tuple], story: Story, rng: np.random.Generator) -> Question:
    """A question drawn from a mix of (asker, share)."""
    askers, shares = zip(*mix, strict=True)
    return askers[rng.choice(len(askers), p=shares)](story, rng)


def prompt(question: Question, task: str) -> str:
    """The text that lmms-eval's own task code makes of a question (the training sees exactly what the evaluation
    asks)."""
    lines = [f"{letter}. {option}" for letter, option in zip(LETTERS, question.options, strict=False)]
    return "\n".join([question.text, *lines]) + (EGOSCHEMA_POST_PROMPT if task == "egoschema" else "")
