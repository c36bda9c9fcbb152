"""Starts a language model from another stand-in's, word embeddings and head included."""

import hashlib
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from windowquant.errors import UserError

CHECKPOINTS = Path(__file__).resolve().parents[1] / "checkpoints"
WEIGHTS = "model.safetensors"
BY_WORD = ("language_model.embed_tokens.weight", "lm_head.weight")  # a row for each token


def find_source(name: str) -> Path:
    """The folder of a checkpoint: a path, or the name of an embedded one (mini_llava_onevision)."""
    for folder in (Path(name).expanduser(), CHECKPOINTS / name.removeprefix("mini_")):
        if (folder / "config.json").is_file() and (folder / WEIGHTS).is_file():
            return folder
    raise UserError(
        f"warm_start is '{name}': give a folder with a config.json and a {WEIGHTS}, the name of an embedded checkpoint "
        "(mini_llava_onevision), or null to start from nothing."
    )


def sha256(source: Path) -> str:
    """Of the checkpoint's weights."""
    return hashlib.sha256((source / WEIGHTS).read_bytes()).hexdigest()


@torch.no_grad()
def warm_start(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, source: Path) -> None:
    """Copies the source's language model and head in place; its words keep their embeddings, which are frozen.

    Rows of tokens that the source does not have stay as they are. Raises UserError where the sizes differ, or where
    the source does not know a word of the mini world.
    """
    other, theirs = AutoModelForImageTextToText.from_pretrained(source), AutoTokenizer.from_pretrained(source)
    ours, known = _shared_rows(tokenizer, theirs, source)
    given = _text_side(other)
    for name, value in _text_side(model).items():
        by_word, found = name in BY_WORD, given.get(name)
        same = slice(1 if by_word else 0, None)  # dimensions that must agree
        if found is None or found.shape[same] != value.shape[same]:
            raise UserError(
                f"warm_start: the language model in {source} has another shape ({name}); give a stand-in's checkpoint."
            )
        if by_word:
            value[ours] = found[known]
        else:
            value.copy_(found)
    model.model.language_model.embed_tokens.requires_grad_(False)


def _text_side(model: PreTrainedModel) -> dict[str, Tensor]:
    """Language model and head, by name, as they are in the model's memory."""
    parts = {"language_model": model.model.language_model, "lm_head": model.lm_head}
    return {f"{part}.{name}": value for part, module in parts.items() for name, value in module.state_dict().items()}


def _shared_rows(
    mine: PreTrainedTokenizerFast, theirs: PreTrainedTokenizerFast, source: Path
) -> tuple[list[int], list[int]]:
    """Ids of the tokens that both know, in this and in the other vocabulary."""
    ours, known = mine.get_vocab(), theirs.get_vocab()
    added = set(mine.get_added_vocab())
    unknown = sorted(token for token in ours if token not in known and token not in added)
    if unknown:
        raise UserError(
            f"warm_start: the model in {source} does not know the token '{unknown[0]}'; train it anew first."
        )
    shared = sorted(token for token in ours if token in known)
    return [ours[token] for token in shared], [known[token] for token in shared]
