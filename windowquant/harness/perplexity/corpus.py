"""Text that every machine has, cut into documents of equal length."""

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from windowquant.errors import UserError


@dataclass(frozen=True)
class Corpus:
    """source: where the text is from, in words. text: the text itself."""

    source: str
    text: str


def packaged_text() -> Corpus:
    """The language reference that Python carries for its `help()`, each paragraph once (its topics share some)."""
    from pydoc_data.topics import topics

    paragraphs = dict.fromkeys(
        paragraph.strip() for name in sorted(topics) for paragraph in topics[name].split("\n\n") if paragraph.strip()
    )
    return Corpus(f"pydoc_data.topics of Python {platform.python_version()}", "\n\n".join(paragraphs))


def text_file(path: Path) -> Corpus:
    """A UTF-8 text file; UserError if it is missing or something else."""
    try:
        return Corpus(path.name, path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as UTF-8 text ({error}); give text=<file>.") from error


def documents(tokens: Sequence[int], length: int, count: int) -> list[Tensor]:
    """`count` stretches of `length` tokens, int64 each, evenly spread over the text and not overlapping.

    Raises UserError if there are too few tokens.
    """
    if count * length > len(tokens):
        raise UserError(
            f"The text has {len(tokens)} tokens, but {count} documents of {length} are asked for; ask for fewer."
        )
    step = len(tokens) // count
    return [torch.tensor(tokens[start : start + length]) for start in range(0, count * step, step)]


def tokenized(tokenizer: Any, corpus: Corpus) -> list[int]:
    """Token ids of the whole text, without special tokens."""
    ids: list[int] = tokenizer(corpus.text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids
