"""An untrained stand-in of each architecture, built once a session, and questions to ask."""

from functools import cache

import numpy as np

from windowquant.mini import scenes as sc
from windowquant.mini.architectures import architecture
from windowquant.mini.training.language import Language
from windowquant.mini.training.rows import Asked


@cache
def language_of(name: str) -> Language:
    """The text side of an untrained model of seed 0; `.model` is the whole of it."""
    kind = architecture(name)
    tokenizer = kind.build_tokenizer()
    return Language(kind, kind.build_model(tokenizer, seed=0), tokenizer)


def questions(seed: int) -> list[Asked]:
    """One of each task."""
    rng = np.random.default_rng(seed)
    story, main = sc.sample_story(rng), sc.sample_story(rng, main="wave")
    return [
        Asked(sc.ask(sc.NEXTQA_MIX, story, rng), "nextqa"),
        Asked(sc.ask_main(main, rng), "egoschema"),
        Asked(sc.ask(sc.INTENTQA_MIX, story, rng), "intentqa"),
        Asked(sc.describe(story), "describe"),
    ]
