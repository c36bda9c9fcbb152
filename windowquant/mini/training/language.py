"""Stages 2 and 3: option letters from text alone, then questions about videos, several per video, each seeing the
video and itself only."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlavaOnevisionForConditionalGeneration, PreTrainedTokenizerFast

from windowquant.mini import scenes as sc
from windowquant.mini.build import PER_FRAME

IGNORE = -100
BEFORE_VIDEO, AFTER_VIDEO, TURN = "<|im_start|>user ", "\n", "<|im_end|><|im_start|>assistant\n"
DESCRIBE_WEIGHT = 1.0


@dataclass
class Rows:
    """Token rows of one batch, all [B, T]: ids, targets of the next token, its weight, and per-position hints (-100
    where none)."""

    ids: Tensor
    labels: Tensor
    weights: Tensor
    hints: Tensor
    part: Tensor


@dataclass(frozen=True)
class Asked:
    question: sc.Question
    task: str


class Language:
    """The text side of a model under training."""

    def __init__(self, model: LlavaOnevisionForConditionalGeneration, tokenizer: PreTrainedTokenizerFast) -> None:
        self.model, self.lm, self.tokenizer = model, model.model.language_model, tokenizer
        width = model.config.text_config.hidden_size
        torch.manual_seed(0)
        # temporary read-outs, thrown away with the training: of the first layer (an option: which letter?) and of the
        # second (a visual token: which scene came before?)
        self.readouts = nn.ModuleDict({name: nn.Linear(width, width) for name in ("letter", "before")})
        self.place_ids = torch.tensor([tokenizer.convert_tokens_to_ids(f"Ġ{w}") for w in sc.PLACES])
        self.letter_ids = {letter: tokenizer.convert_tokens_to_ids(f"Ġ({letter})") for letter in sc.LETTERS}
        self.end, self.comma = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(",")
        self.prefix = self.encode(BEFORE_VIDEO)

    def parameters(self) -> dict[str, nn.Parameter]:
        # the word embeddings stay as the vision stage left them: the window search relies on the shared space
        named = {f"lm.{n}": p for n, p in self.lm.named_parameters() if n != "embed_tokens.weight"}
        named |= {f"readouts.{n}": p for n, p in self.readouts.named_parameters()}
        named |= {f"head.{n}": p for n, p in self.model.lm_head.named_parameters()}
        return named | {"newline": self.model.model.image_newline}

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.lm_head(hidden)

    def hint_logits(self, hidden: Tensor, readout: str) -> Tensor:
        return self.logits(self.readouts[readout](self.lm.norm(hidden)))

    def pad(self, rows: Sequence[tuple]) -> Rows:
        fill = (self.tokenizer.pad_token_id, IGNORE, 0.0, IGNORE, -1)
        return Rows(*(_pad([row[k] for row in rows], value) for k, value in enumerate(fill)))

    def hidden(self, rows: Rows, embeddings: Tensor, shift: Tensor | int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """-> last hidden state, first layer's output, second layer's output; [B, T, 192] each."""
        mask, position = _mask_and_positions(rows.part)
        out = self.lm(
            inputs_embeds=embeddings,
            attention_mask={"full_attention": mask[:, None]},
            position_ids=position + shift,
            output_hidden_states=True,
        )
        return out.last_hidden_state, *out.hidden_states[1:3]

    def segment(self, asked: Asked) -> tuple[list[int], list[int], list[int]]:
        """One question and its reply -> ids, labels (reply and end only), hints (an option's last token: that
        option's letter)."""
        lines = sc.prompt(asked.question, asked.task).split("\n")
        ids, hints = self.encode(AFTER_VIDEO + lines[0]), []
        hints += [IGNORE] * len(ids)
        for k, line in enumerate(lines[1:]):
            tokens = self.encode("\n" + line)
            is_option = k < len(asked.question.options)
            hints += [IGNORE] * (len(tokens) - 1) + [self.letter_ids[sc.LETTERS[k]] if is_option else IGNORE]
            ids += tokens
        turn, reply = self.encode(TURN), [*self.encode(" " + asked.question.reply), self.end]
        labels = [IGNORE] * (len(ids) + len(turn)) + reply
        return ids + turn + reply, labels, hints + [IGNORE] * (len(turn) + len(reply))


def _mask_and_positions(part: Tensor) -> tuple[Tensor, Tensor]:
    """Part 0 is common, every other part sees it and itself only -> mask [B, T, T], positions [B, T] that restart
    after the common part."""
    at = torch.arange(part.shape[1])
    mask = ((part[:, None, :] == 0) | (part[:, :, None] == part[:, None, :])) & (at[:, None] >= at)
    start = torch.stack([torch.where(part == j, at, part.shape[1]).amin(1) for j in range(1, int(part.max()) + 1)], 1)
    common = (part == 0).sum(1, keepdim=True)
    position = torch.where(part > 0, at - start.gather(1, (part - 1).clamp_min(0)) + common, at)
    return mask, position


def _pad(rows: Sequence[Sequence[float]], value: float) -> Tensor:
    size = max(map(len, rows))
    return torch.tensor([[*row, *[value] * (size - len(row))] for row in rows])


# ---- letters -----------------------------------------------------------------------------------------------


def _practice(language: Language, asked: Asked, rng: np.random.Generator) -> tuple[list[int], ...]:
    """A question whose five options are all looked up, each look-up seeing the question and itself only -> ids,
    labels, hints, part."""
    ids, labels, hints = language.segment(asked)
    cut = next(k for k, label in enumerate(labels) if label != IGNORE)
    ids, labels, hints, part = ids[:cut], labels[:cut], hints[:cut], [0] * cut
    for k, option in enumerate(asked.question.options):
        text = language.encode(" " + option)
        ids += [*text, language.letter_ids[sc.LETTERS[k]]]
        labels += [IGNORE] * len(text) + [language.letter_ids[sc.LETTERS[k]]]
        part += [k + 1] * (len(text) + 1)
    return ids, labels, hints + [IGNORE] * (len(ids) - cut), part


def _any_question(story: sc.Story, main: sc.Story, rng: np.random.Generator) -> Asked:
    draw = rng.random()
    if draw < 0.2:
        return Asked(sc.ask_main(main, rng), "egoschema")
    return Asked(sc.ask(sc.NEXTQA_MIX if draw < 0.6 else sc.INTENTQA_MIX, story, rng), "nextqa")


def letter_rows(language: Language, n: int, rng: np.random.Generator) -> Rows:
    rows = []
    for _ in range(n):
        asked = _any_question(sc.sample_story(rng), sc.sample_story(rng, main=str(rng.choice(sc.CONTENTS))), rng)
        ids, labels, hints, part = _practice(language, asked, rng)
        rows.append((ids, labels, [1.0] * len(ids), hints, part))
    return language.pad(rows)


def _letter_hidden(language: Language, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
    # real prompts hold a video between the turn's start and the question: let the positions vary as they do there
    return language.hidden(rows, language.lm.embed_tokens(rows.ids), torch.randint(0, 600, (len(rows.ids), 1)))


def letter_loss(language: Language, n: int, rng: np.random.Generator, hint_weight: float = 0.3) -> Tensor:
    rows = letter_rows(language, n, rng)
    deep, early, _ = _letter_hidden(language, rows)
    target, hinted = rows.labels[:, 1:], rows.hints >= 0
    loss = F.cross_entropy(language.logits(deep[:, :-1][target >= 0]), target[target >= 0])
    return loss + hint_weight * F.cross_entropy(language.hint_logits(early[hinted], "letter"), rows.hints[hinted])


@torch.no_grad()
def letter_report(language: Language, n: int = 128) -> dict[str, float]:
    rows = letter_rows(language, n, np.random.default_rng(3))
    deep, early, _ = _letter_hidden(language, rows)
    target, hinted = rows.labels[:, 1:], rows.hints >= 0
    right = language.logits(deep[:, :-1][target >= 0]).argmax(-1) == target[target >= 0]
    hint = language.hint_logits(early[hinted], "letter").argmax(-1) == rows.hints[hinted]
    return {"letter": right.float().mean().item(), "letter hint": hint.float().mean().item()}


# ---- videos ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difficulty:
    """How long the videos are and of how many scenes."""

    frames: int
    scenes: tuple[int, int]


FULL = Difficulty(sc.FRAMES, (8, 14))
Asker = Callable[[sc.Story, np.random.Generator], sc.Question]
Picker = Callable[[np.random.Generator, sc.Story, bool], list[Asked]]


def _open(question: sc.Question) -> Asked:
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
        out = [_open(q) for q in drawn[:opened]] + [Asked(q, "nextqa") for q in drawn[opened:]]
        if has_main:
            out.append(Asked(sc.ask_main(story, rng), "egoschema"))
        return [*out, Asked(sc.describe(story), "describe")]

    return pick


class Videos:
    """Assembles batches from a bank of frame tokens [places, contents, per, 4, 192]."""

    def __init__(self, language: Language, bank: Tensor) -> None:
        self.language, self.bank = language, bank

    def _tokens(self, story: sc.Story, rng: np.random.Generator) -> tuple[Tensor, np.ndarray]:
        """-> [frames*4, 192] visual tokens, [frames] place index of each frame."""
        which = story.scene_of_frame()
        place = np.array([sc.PLACES.index(s.place) for s in story.scenes])[which]
        content = np.array([sc.CONTENTS.index(s.content) for s in story.scenes])[which]
        pick = rng.integers(0, self.bank.shape[2], len(which))
        return self.bank[torch.from_numpy(place), torch.from_numpy(content), torch.from_numpy(pick)].flatten(
            0, 1
        ), place

    def _places_before(self, place: np.ndarray) -> np.ndarray:
        """[frames] place index -> [frames] word id of the place of the scene before, -100 in the first scene."""
        frames = np.arange(len(place))
        starts = np.maximum.accumulate(np.where(np.diff(place, prepend=place[0]) != 0, frames, 0))
        return np.where(starts > 0, self.language.place_ids.numpy()[place[starts - 1]], IGNORE)

    def batch(
        self, n: int, rng: np.random.Generator, level: Difficulty, pick: Picker, main_share: float = 0.35
    ) -> tuple[Rows, Tensor]:
        """-> rows, visual tokens [n, frames*4, 192]."""
        language, visual, rows = self.language, [], []
        for _ in range(n):
            has_main = bool(rng.random() < main_share)
            main = str(rng.choice(sc.CONTENTS)) if has_main else None
            story = sc.sample_story(rng, level.scenes, level.frames, main)
            tokens, place = self._tokens(story, rng)
            visual.append(tokens)
            slots = len(tokens) + 1
            before = self._places_before(place)
            start = len(language.prefix) + slots
            ids = [*language.prefix, *[language.model.config.video_token_id] * slots]
            hints = [IGNORE] * len(language.prefix) + np.repeat(before, PER_FRAME).tolist() + [IGNORE]
            labels, weights, part = [IGNORE] * start, [0.0] * start, [0] * start
            for j, asked in enumerate(pick(rng, story, has_main)):
                more, target, hint = language.segment(asked)
                ids, labels, hints, part = ids + more, labels + target, hints + hint, part + [j + 1] * len(more)
                weights += [DESCRIBE_WEIGHT if asked.task == "describe" else 1.0] * len(more)
            rows.append((ids, labels, weights, hints, part))
        return language.pad(rows), torch.stack(visual)

    def hidden(self, rows: Rows, visual: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As `Language.hidden`, with the visual tokens [B, frames*4, 192] in their slots."""
        language, e = self.language, self.language.lm.embed_tokens(rows.ids)
        first, newline = len(language.prefix), language.model.model.image_newline
        after = first + visual.shape[1] + 1
        e = torch.cat([e[:, :first], visual, newline.expand(len(e), 1, -1), e[:, after:]], 1)
        return language.hidden(rows, e)


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
