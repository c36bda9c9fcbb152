"""Questions about videos, several per video, each seeing the video and itself only."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from windowquant.mini import scenes as sc
from windowquant.mini.architectures import Layout
from windowquant.mini.text_model import PER_FRAME
from windowquant.mini.training.language import Language
from windowquant.mini.training.rows import IGNORE, Asked, Rows, rows_of

DESCRIBE_WEIGHT = 1.0


@dataclass(frozen=True)
class Difficulty:
    """How long the videos are and of how many scenes."""

    frames: int
    scenes: tuple[int, int]


Asker = Callable[[sc.Story, np.random.Generator], sc.Question]
Picker = Callable[[np.random.Generator, sc.Story, bool], list[Asked]]


def open_question(question: sc.Question) -> Asked:
    """The same question without options, answered in words: a third of the tokens, all of the search in the video."""
    words = question.reply.rsplit(" ", 1)[0]
    return Asked(replace(question, options=(), answer=-1, reply=words), "nextqa")


def training_questions(opened: int, closed: int) -> Picker:
    """Open and closed questions of all kinds, and the description or (of a video with a main content) what it is
    about."""
    askers = (
        sc.ask_current,
        sc.ask_current,
        sc.ask_why,
        sc.ask_how,
        sc.ask_next,
        sc.ask_previous,
        sc.ask_intended_place,
    )

    def pick(rng: np.random.Generator, story: sc.Story, has_main: bool) -> list[Asked]:
        drawn = [askers[k](story, rng) for k in rng.integers(len(askers), size=opened + closed)]
        out = [open_question(q) for q in drawn[:opened]] + [Asked(q, "nextqa") for q in drawn[opened:]]
        if has_main:
            out.append(Asked(sc.ask_main(story, rng), "egoschema"))
        return [*out, Asked(sc.describe(story), "describe")]

    return pick


class Videos:
    """Assembles batches from a bank of visual tokens [places, contents, per, 4, 192]."""

    def __init__(self, language: Language, bank: Tensor) -> None:
        self.language, self.bank = language, bank

    def _tokens(self, story: sc.Story, rng: np.random.Generator) -> tuple[Tensor, np.ndarray]:
        """-> [groups*4, 192] visual tokens, [groups] place index of each group of frames."""
        which = story.scene_of_frame()[:: self.language.architecture.stride]
        place = np.array([sc.PLACES.index(s.place) for s in story.scenes])[which]
        content = np.array([sc.CONTENTS.index(s.content) for s in story.scenes])[which]
        pick = rng.integers(0, self.bank.shape[2], len(which))
        return self.bank[torch.from_numpy(place), torch.from_numpy(content), torch.from_numpy(pick)].flatten(
            0, 1
        ), place

    def _places_before(self, place: np.ndarray) -> np.ndarray:
        """[groups] place index -> [groups] word id of the place of the scene before, -100 in the first scene."""
        frames = np.arange(len(place))
        starts = np.maximum.accumulate(np.where(np.diff(place, prepend=place[0]) != 0, frames, 0))
        return np.where(starts > 0, self.language.place_ids.numpy()[place[starts - 1]], IGNORE)

    def layout(self, frames: int) -> Layout:
        """The common part of the rows of videos of so many frames."""
        language = self.language
        return language.architecture.layout(language.tokenizer, frames // language.architecture.stride)

    def batch(
        self, n: int, rng: np.random.Generator, level: Difficulty, pick: Picker, main_share: float = 0.35
    ) -> tuple[Rows, Tensor]:
        """-> rows, visual tokens [n, groups*4, 192]."""
        language, layout, visual, rows = self.language, self.layout(level.frames), [], []
        start = len(layout.ids)
        for _ in range(n):
            has_main = bool(rng.random() < main_share)
            main = str(rng.choice(sc.CONTENTS)) if has_main else None
            story = sc.sample_story(rng, level.scenes, level.frames, main)
            tokens, place = self._tokens(story, rng)
            visual.append(tokens)
            before = np.full(start, IGNORE)
            before[layout.visual] = np.repeat(self._places_before(place), PER_FRAME)
            ids, hints = layout.ids, before.tolist()
            labels, weights, part = [IGNORE] * start, [0.0] * start, [0] * start
            for j, asked in enumerate(pick(rng, story, has_main)):
                more, target, hint = language.segment(asked)
                ids, labels, hints, part = ids + more, labels + target, hints + hint, part + [j + 1] * len(more)
                weights += [DESCRIBE_WEIGHT if asked.task == "describe" else 1.0] * len(more)
            rows.append((ids, labels, weights, hints, part))
        out = rows_of(rows, language.tokenizer.pad_token_id)
        positions = language.architecture.positions(out.positions, out.part, layout)
        return replace(out, positions=positions), torch.stack(visual)

    def hidden(self, rows: Rows, visual: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As `Language.hidden`, with the visual tokens [B, groups*4, 192] in their slots."""
        language = self.language
        architecture, frames = language.architecture, visual.shape[1] // PER_FRAME * language.architecture.stride
        words = language.lm.embed_tokens(rows.ids)
        return language.hidden(rows, architecture.embed(language.model, words, visual, self.layout(frames)))


def video_loss(videos: Videos, rows: Rows, visual: Tensor, hint_weight: float = 0.3) -> Tensor:
    language = videos.language
    deep, early, middle = videos.hidden(rows, visual)
    target, weight = rows.labels[:, 1:], rows.weights[:, 1:]
    asked = target >= 0
    each = F.cross_entropy(language.logits(deep[:, :-1][asked]), target[asked], reduction="none")
    loss = (each * weight[asked]).sum() / weight[asked].sum()
    letters = torch.where(rows.part > 0, rows.hints, IGNORE)
    for readout, layer, hints in (("before", middle, links(language, rows)), ("letter", early, letters)):
        hinted = hints >= 0
        if hinted.any():
            hint = F.cross_entropy(language.hint_logits(layer[hinted], readout), hints[hinted])
            loss = loss + hint_weight * hint
    return loss


def links(language: Language, rows: Rows) -> Tensor:
    """[B, T] the place that a position comes after, -100 where none: of a visual token, the place of the scene before;
    of a comma in a reply, the place just listed ("desert wave, ..."). Both are asked of one read-out, so that what
    follows in the list and what follows in the video are written alike."""
    listed = (rows.ids == language.comma) & (rows.labels >= 0)
    return torch.where(rows.part == 0, rows.hints, torch.where(listed, rows.ids.roll(2, 1), IGNORE))
