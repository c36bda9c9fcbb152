"""Practice without a video: of five options, which letter has the one that was said."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from windowquant.mini import scenes as sc
from windowquant.mini.training.language import Language
from windowquant.mini.training.rows import IGNORE, Asked, Rows, rows_of


def _practice(language: Language, asked: Asked) -> tuple[list[int], ...]:
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
        ids, labels, hints, part = _practice(language, asked)
        rows.append((ids, labels, [1.0] * len(ids), hints, part))
    return rows_of(rows, language.tokenizer.pad_token_id)


def _hidden(language: Language, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
    # real prompts hold a video between the turn's start and the question: let the positions vary as they do there
    return language.hidden(rows, language.lm.embed_tokens(rows.ids), torch.randint(0, 600, (len(rows.ids), 1)))


def letter_loss(language: Language, n: int, rng: np.random.Generator, hint_weight: float = 0.3) -> Tensor:
    rows = letter_rows(language, n, rng)
    deep, early, _ = _hidden(language, rows)
    target, hinted = rows.labels[:, 1:], rows.hints >= 0
    loss = F.cross_entropy(language.logits(deep[:, :-1][target >= 0]), target[target >= 0])
    return loss + hint_weight * F.cross_entropy(language.hint_logits(early[hinted], "letter"), rows.hints[hinted])


@torch.no_grad()
def letter_report(language: Language, n: int = 128) -> dict[str, float]:
    rows = letter_rows(language, n, np.random.default_rng(3))
    deep, early, _ = _hidden(language, rows)
    target, hinted = rows.labels[:, 1:], rows.hints >= 0
    right = language.logits(deep[:, :-1][target >= 0]).argmax(-1) == target[target >= 0]
    hint = language.hint_logits(early[hinted], "letter").argmax(-1) == rows.hints[hinted]
    return {"letter": right.float().mean().item(), "letter hint": hint.float().mean().item()}
