"""A very small set of generated data, drawn once a session, and an oracle of its questions."""

import re
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from windowquant.mini.corpus import Sizes, Table, build
from windowquant.mini.data import ensure
from windowquant.mini.scenes import Story

SEED = 11
SIZES = Sizes(videos=2, per_task=2, egoschema=1)
_folder = TemporaryDirectory(prefix="windowquant-tests-")


@cache
def tiny_root() -> Path:
    """Root of the generated data of SEED and SIZES."""
    return ensure(Path(_folder.name) / "data", SEED, SIZES)


def tiny_corpus() -> dict[str, Table]:
    return build(SEED, SIZES)


def is_right(story: Story, question: str, option: str) -> bool:
    """Whether an option answers a question about a story; from the words alone, without the generator's code."""
    places = [scene.place for scene in story.scenes]
    contents = [scene.content for scene in story.scenes]
    if "long video" in question:
        frames = {c: sum(n for d, n in zip(contents, story.lengths, strict=True) if d == c) for c in contents}
        return frames.get(option, 0) == max(frames.values())
    k = places.index(re.findall(r"\w+", question)[-1])
    if question.startswith("which scene comes"):
        other = k + (1 if "after" in question else -1)
        return option == f"{places[other]} {contents[other]}"
    if question.startswith("where does the man want to go after"):
        return option == places[k + 1]
    if question.startswith("why did the man go to"):
        return option == f"to {contents[k]}"
    assert re.match(r"what is the man doing|which object moves|which number is|how does the man spend", question)
    return option == contents[k]
