"""Models that torch.compile has changed, with Dynamo's own count of what it compiled; no compiler is needed."""

from collections.abc import Iterator

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from transformers import PreTrainedModel

from tests.architectures import batch_inputs, build
from tests.generation.common import EXACT, WHY, WINDOWQUANT, asked, generate, loaded, same_steps
from windowquant.method import get_method
from windowquant.models import adapter_for


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled(name: str, part: str) -> tuple[PreTrainedModel, CompileCounter]:
    model, counter = build(name)[0], CompileCounter()
    language_model = adapter_for(model).language_model(model)
    if part == "forward":
        model.forward = torch.compile(model.forward, backend=counter)
    modules = {"forward": [], "model": [model], "language model": [language_model], "layers": language_model.layers}
    for module in modules[part]:
        module.compile(backend=counter)
    return model, counter


@pytest.mark.parametrize("method", [EXACT, WINDOWQUANT], ids=lambda method: method["name"])
@pytest.mark.parametrize(
    ("name", "part"),
    [("llava_onevision", "forward"), ("llava_onevision", "language model"), ("qwen2_vl", "layers")],
)
def test_compiled_models_give_the_same_logits_and_compile_nothing_at_later_steps(name, part, method) -> None:
    inputs, _ = batch_inputs(name, loaded(name)[1])
    with get_method(**method).bind(loaded(name)[0]) as bound:
        want = generate(bound.model, inputs, bound.new_cache(inputs), max_new_tokens=24)
    model, counter = compiled(name, part)
    with get_method(**method).bind(model) as bound:
        generate(model, inputs, bound.new_cache(inputs), max_new_tokens=4)
        frames = counter.frame_count
        got = generate(model, inputs, bound.new_cache(inputs), max_new_tokens=24)
    assert same_steps(got, want)
    assert 0 < frames == counter.frame_count


@torch._dynamo.config.patch(recompile_limit=1000)  # or it would soon run everything as it is
@pytest.mark.parametrize("part", ["model", "layers"])
def test_a_compiled_model_notices_each_binding(part: str) -> None:
    name, online = "llava_onevision", {**WINDOWQUANT, "sensitivity": "online"}
    (plain, _), (model, _), inputs = loaded(name), compiled(name, part), asked(name, WHY)
    unbound = generate(model, inputs)
    for method in (EXACT, WINDOWQUANT, online, {"name": "kivi", "group": 8}):
        with get_method(**method).bind(plain) as bound:
            want = generate(plain, inputs, bound.new_cache(inputs))
        with get_method(**method).bind(model) as bound:
            assert same_steps(generate(model, inputs, bound.new_cache(inputs)), want)
    assert same_steps(generate(model, inputs), unbound)
