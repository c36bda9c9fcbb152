"""What a model under training can do on held-out drawings and stories, teacher-forced, kind by kind."""

import numpy as np
import torch
from torch import Tensor

from windowquant.mini import scenes as sc
from windowquant.mini.training.rows import Asked
from windowquant.mini.training.videos import Asker, Difficulty, Picker, Videos

ASKERS = {
    "current": sc.ask_current,
    "why": sc.ask_why,
    "next": sc.ask_next,
    "previous": sc.ask_previous,
    "place": sc.ask_intended_place,
    "main": sc.ask_main,
}


@torch.no_grad()
def video_report(videos: Videos, level: Difficulty, n: int = 32) -> dict[str, float]:
    """Held-out accuracy per kind of question, teacher-forced: of the reply's words, of its letter, of the
    description's tokens."""
    out = {}
    for name, asker in ASKERS.items():

        def pick(
            rng: np.random.Generator, story: sc.Story, _: bool, asker: Asker = asker, name: str = name
        ) -> list[Asked]:
            return [Asked(asker(story, rng), "egoschema" if name == "main" else "nextqa")]

        right, asked = _right(videos, level, pick, n, float(name == "main"))
        last = asked.int().cumsum(1)
        letter = last == last[:, -1:] - 1  # the reply ends with its letter and the turn's end
        words = asked & (last < last[:, -1:] - 1)
        out[name] = (right | ~words).all(1).float().mean().item()
        out[f"{name} letter"] = (right & letter & asked).any(1).float().mean().item()
    right, asked = _right(videos, level, _describe, n, 0.0)
    out["describe"] = right[asked].float().mean().item()
    return out | {"before hint": _before_hint(videos, level, n)}


def _describe(rng: np.random.Generator, story: sc.Story, _: bool) -> list[Asked]:
    return [Asked(sc.describe(story), "describe")]


def _before_hint(videos: Videos, level: Difficulty, n: int) -> float:
    rows, visual = videos.batch(n, np.random.default_rng(6), level, _describe, 0.0)
    hinted = (rows.part == 0) & (rows.hints >= 0)
    logits = videos.language.hint_logits(videos.hidden(rows, visual)[2][hinted], "before")
    return (logits.argmax(-1) == rows.hints[hinted]).float().mean().item()


def _right(videos: Videos, level: Difficulty, pick: Picker, n: int, main_share: float) -> tuple[Tensor, Tensor]:
    rows, visual = videos.batch(n, np.random.default_rng(5), level, pick, main_share)
    deep = videos.hidden(rows, visual)[0]
    target = rows.labels[:, 1:]
    return videos.language.logits(deep[:, :-1]).argmax(-1) == target, target >= 0
