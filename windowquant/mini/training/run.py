"""The stages of one training, in order; each resumes from what the folder holds."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from windowquant.mini.architectures import Architecture
from windowquant.mini.render import Drawings
from windowquant.mini.training.held_out import video_report
from windowquant.mini.training.language import Language
from windowquant.mini.training.letters import letter_loss, letter_report
from windowquant.mini.training.loop import Stage, fit
from windowquant.mini.training.videos import Difficulty, Videos, training_questions, video_loss
from windowquant.mini.training.vision import Vision, accuracy, frame_bank, labelled, still_pool
from windowquant.mini.training.warm_start import warm_start


@dataclass(frozen=True)
class Recipe:
    """Steps, rates and sizes of a training; `conf/train_mini.yaml` has the values.

    What made the shipped checkpoint differs a little: its README says how.
    """

    seed: int
    stills: int
    vision_steps: int
    vision_batch: int
    vision_rate: float
    tiny_steps: int
    tiny_rate: float
    short_steps: int
    short_rate: float
    long_steps: int
    long_rate: float
    last_steps: int
    last_rate: float
    report_every: int


@dataclass(frozen=True)
class Level:
    """One rung of the curriculum: how long the videos are and of how many scenes, how many make a batch, and the
    questions asked of each, without and with options."""

    frames: int
    scenes: tuple[int, int]
    batch: int
    opened: int
    closed: int


TINY = Level(16, (2, 4), 12, 6, 1)
SHORT = Level(32, (3, 6), 10, 7, 2)
LONG = Level(96, (8, 14), 8, 8, 3)
LAST = Level(96, (8, 14), 8, 3, 2)  # mostly descriptions: what is learned last
HELD_OUT_STILLS = 8  # of each content in each place, as `Recipe.stills` of the training
PRACTICE, PRACTICE_WEIGHT = 8, 0.4  # questions without a video whose letters are looked up beside every video batch


def train(recipe: Recipe, architecture: Architecture, source: Path | None, folder: Path) -> PreTrainedModel:
    """Runs (or resumes) every stage in the folder and returns the trained model, on the CPU, in float32.

    source: the checkpoint whose language model and words this one starts from; None starts from nothing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = architecture.build_tokenizer()
    model = architecture.build_model(tokenizer, recipe.seed)
    if source is not None:
        warm_start(model, tokenizer, source)
    vision = Vision(architecture, model, tokenizer, words_given=source is not None)
    pools = {
        held: still_pool(HELD_OUT_STILLS if held else recipe.stills, Drawings(held), recipe.seed, architecture.merged)
        for held in (False, True)
    }
    _vision(recipe, vision, pools, folder)
    banks = {held: frame_bank(vision, pool) for held, pool in pools.items()}
    one_of_each = pools[False][:, :, 0].flatten(0, 1)
    del pools
    language = Language(architecture, model, tokenizer)
    videos, held = (Videos(language, banks[h]) for h in (False, True))
    for name, level, steps, rate in (
        ("tiny", TINY, recipe.tiny_steps, recipe.tiny_rate),
        ("short", SHORT, recipe.short_steps, recipe.short_rate),
        ("long", LONG, recipe.long_steps, recipe.long_rate),
        ("last", LAST, recipe.last_steps, recipe.last_rate),
    ):
        _videos(Stage(name, steps, rate, recipe.seed, recipe.report_every), level, videos, held, folder)
    architecture.settle(model, one_of_each)
    return model.eval()


def _vision(recipe: Recipe, vision: Vision, pools: dict[bool, Tensor], folder: Path) -> None:
    def loss(_: float, rng: np.random.Generator) -> Tensor:
        pixels, place, content = labelled(pools[False], recipe.vision_batch, rng)
        return vision.alignment(vision.frame_tokens(pixels), place, content)[0]

    stage = Stage("vision", recipe.vision_steps, recipe.vision_rate, recipe.seed, recipe.report_every)
    fit(stage, vision.parameters(), loss, lambda: accuracy(vision, pools[True]), folder)


def _videos(stage: Stage, level: Level, videos: Videos, held: Videos, folder: Path) -> None:
    language = videos.language
    difficulty, pick = Difficulty(level.frames, level.scenes), training_questions(level.opened, level.closed)

    def loss(_: float, rng: np.random.Generator) -> Tensor:
        rows, visual = videos.batch(level.batch, rng, difficulty, pick)
        return video_loss(videos, rows, visual) + PRACTICE_WEIGHT * letter_loss(language, PRACTICE, rng)

    def report() -> dict[str, float]:
        return video_report(held, difficulty) | letter_report(language)

    fit(stage, language.parameters(), loss, report, folder)
