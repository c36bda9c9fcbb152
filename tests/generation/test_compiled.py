"""Models that torch.compile has changed, with Dynamo's own count of what it compiled; no compiler is needed."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from transformers import PreTrainedModel

from tests.architectures import batch_inputs, build
from tests.conformance.cases import CASES
from tests.generation.common import EXACT, WHY, WINDOWQUANT, asked, generate, loaded, same_steps
from windowquant.errors import UserError
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
    modules = {"forward": [], "language model": [language_model], "layers": language_model.layers}
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
def test_a_compiled_model_notices_each_binding(tmp_path: Path) -> None:
    name = "llava_onevision"
    (plain, _), (model, counter), inputs = loaded(name), compiled(name, "layers"), asked(name, WHY)
    unbound = generate(model, inputs)
    cases = [case.method(name, tmp_path) for case in CASES if case.id in ("smoothquant", "token_level-attention")]
    methods = [get_method(**method) for method in (EXACT, WINDOWQUANT, {**WINDOWQUANT, "sensitivity": "online"})]
    assert len(cases) == 2
    for method in methods + cases:
        with method.bind(plain) as bound:
            want = generate(plain, inputs, bound.new_cache(inputs))
        before = counter.frame_count
        with method.bind(model) as bound:
            cache = bound.new_cache(inputs)
            assert same_steps(generate(model, inputs, cache), want)
        assert counter.frame_count > before and cache.packed
    assert same_steps(generate(model, inputs), unbound)


def test_other_compiled_models_are_left_alone() -> None:
    counter, name = CompileCounter(), "llava_onevision"
    other = torch.compile(torch.nn.Linear(2, 2), backend=counter)
    other(torch.zeros(1, 2))
    with get_method(**EXACT).bind(loaded(name)[0]):
        other(torch.zeros(1, 2))
    assert counter.frame_count == 1


def test_a_wrapped_model_is_told_apart_in_words() -> None:
    with pytest.raises(UserError, match="wrapped by torch.compile, .* _orig_mod"):
        get_method(**EXACT).bind(torch.compile(build("qwen2_vl")[0]))
