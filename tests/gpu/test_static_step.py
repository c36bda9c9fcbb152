"""The whole decode step of a model, captured in a CUDA graph."""

import pytest
import torch

from tests.generation.common import EXACT, WINDOWQUANT, generate
from tests.vlm import batch_inputs, tiny_model, video_ids
from windowquant.method import get_method

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

STEPS = 24


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("method", [EXACT, WINDOWQUANT], ids=lambda method: method["name"])
def test_a_captured_step_gives_the_tokens_of_generate(method, compiled: bool, device: torch.device) -> None:
    model = tiny_model(head_dim=32).to(device)
    inputs = {key: x.to(device) for key, x in batch_inputs([video_ids(after=7), video_ids(after=3)], 8).items()}
    with get_method(**method).bind(model) as bound:
        want = generate(model, inputs, bound.new_cache(inputs), max_new_tokens=1 + STEPS).sequences[:, -1 - STEPS :]
        cache = bound.new_cache(inputs)
        tokens = [generate(model, inputs, cache, max_new_tokens=1).sequences[:, -1:]]
        step = bound.static_step(cache, STEPS)
        if compiled:
            step.compile(fullgraph=True)
        for _ in range(STEPS):
            tokens.append(step(tokens[-1]).argmax(-1, keepdim=True))
        assert step.captured
    assert torch.equal(torch.cat(tokens, 1), want)
