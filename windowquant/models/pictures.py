"""Which visual tokens of a prompt belong to which image or frame."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from windowquant.models.prompt import Prompt

Kind = Literal["image", "video"]


@dataclass(frozen=True)
class Run:
    """Visual tokens of one kind without a gap: columns `start` to `start + length` of a row.

    index: how many runs of this kind the batch holds before this one, as the processor counts its grids.
    """

    start: int
    length: int
    kind: Kind
    index: int


@dataclass(frozen=True, eq=False)
class Picture:
    """One image, or one frame of a video (or the few frames that an architecture merges in time).

    columns: int64 [M], ascending. kind: what the prompt's placeholder calls it.
    """

    columns: Tensor
    kind: Kind


def runs_of(prompt: Prompt, video_token: int | None) -> list[list[Run]]:
    """The runs of each row, in order."""
    counts: dict[Kind, int] = {"image": 0, "video": 0}
    rows = []
    for ids, columns in zip(prompt.input_ids, prompt.visual_positions, strict=True):
        tokens = ids[columns]
        breaks = (columns.diff() != 1) | (tokens.diff() != 0)
        lengths = torch.diff(
            torch.cat([torch.tensor([-1]), breaks.nonzero().flatten(), torch.tensor([len(columns) - 1])])
        )
        row, at = [], 0
        for length in lengths.tolist() if len(columns) else ():
            kind: Kind = "video" if int(tokens[at]) == video_token else "image"
            row.append(Run(int(columns[at]), length, kind, counts[kind]))
            counts[kind] += 1
            at += length
        rows.append(row)
    return rows


def split(run: Run, lengths: list[int]) -> list[Picture]:
    """The pictures of a run, given their lengths; one picture where these do not add up to the run."""
    if sum(lengths) != run.length:
        lengths = [run.length]
    starts = torch.tensor([0, *lengths]).cumsum(0) + run.start
    return [
        Picture(torch.arange(a, b), run.kind) for a, b in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)
    ]
