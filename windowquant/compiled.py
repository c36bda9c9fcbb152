"""Which models `torch.compile` has changed in a way that does not go together with a packed cache."""

from torch import nn
from transformers import PreTrainedModel

from windowquant.errors import UserError


def check_not_compiled(model: PreTrainedModel, language_model: nn.Module) -> None:
    """Raise UserError if the model, or its language model or a part of that, is compiled; a vision tower may be.

    A packed cache gains a token at every step and changes its form after prefill: each would compile anew.
    """
    inside = set(language_model.modules())
    above = (module for module in model.modules() if inside & set(module.modules()))
    if hasattr(model, "_orig_mod") or any(_is_compiled(module) for module in above):
        raise UserError(
            "The language model is compiled by torch.compile, which would compile again for each length of the cache; "
            "bind the model as it was before (torch.compile keeps it as _orig_mod), or compile its vision tower only."
        )


def _is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None or hasattr(module.forward, "_torchdynamo_orig_callable")
