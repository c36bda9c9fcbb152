"""Models that `torch.compile` has changed."""

import torch
from torch import nn
from transformers import PreTrainedModel

from windowquant.errors import UserError


def check_not_wrapped(model: nn.Module) -> None:
    """Raise UserError for what `torch.compile(model)` returns, which is no model but around one."""
    if hasattr(model, "_orig_mod"):
        raise UserError(
            "This is a model wrapped by torch.compile, whose generate is not compiled; bind the model inside, which it "
            "keeps as _orig_mod, or compile with model.compile()."
        )


def compile_anew(model: PreTrainedModel, language_model: nn.Module) -> None:
    """Drop what was compiled if the model, its language model or a part of that is: hooks come or go, unnoticed by it.

    A compiled vision tower alone is left as it is.
    """
    inside = set(language_model.modules())
    above = (module for module in model.modules() if inside & set(module.modules()))
    if any(_is_compiled(module) for module in above):
        torch.compiler.reset()


def _is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None or hasattr(module.forward, "_torchdynamo_orig_callable")
