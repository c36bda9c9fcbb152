"""Models in other dtypes, those with a compiled vision tower, and what is left of a binding afterwards."""

import pytest
import torch

from tests.architectures import batch_inputs, build
from tests.generation.common import EXACT, NAMES, WHY, WINDOWQUANT, asked, close_steps, generate, loaded, same_steps
from windowquant.method import get_method


def in_dtype(inputs, dtype: torch.dtype):
    return {key: x.to(dtype) if torch.is_floating_point(x) else x for key, x in inputs.items()}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_every_dtype(name: str, dtype: torch.dtype) -> None:
    model, processor = build(name)
    model, inputs = model.to(dtype), in_dtype(asked(name), dtype)
    want, want_beams = generate(model, inputs), generate(model, inputs, num_beams=2)
    batch = in_dtype(batch_inputs(name, processor)[0], dtype)
    want_batch = generate(model, batch)
    with get_method(**EXACT).bind(model) as bound:
        cache = bound.new_cache(inputs)
        assert same_steps(generate(model, inputs, cache), want)
        assert cache.layers[0].stored.kept.k.dtype == dtype
        assert same_steps(generate(model, inputs, bound.new_cache(inputs), num_beams=2), want_beams)
        assert same_steps(generate(model, batch, bound.new_cache(batch)), want_batch)
    with get_method(**WINDOWQUANT).bind(model) as bound:
        cache = bound.encode(inputs)
        out = generate(model, bound.resume(cache, inputs))
        assert out.logits[0].isfinite().all() and {16, 4, 2} >= set(cache.stats.bits) > {16}
        stored = cache.layers[0].stored
        assert {stored.kept.k.dtype, *(b.scale.dtype for b in stored.blocks())} == {
            torch.float16 if dtype == torch.float32 else dtype
        }


def state(model) -> tuple:
    """What a binding might leave behind."""
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    deltas = [m.rope_deltas for m in model.modules() if hasattr(m, "rope_deltas")]
    return hooks, model.config.to_dict(), sorted(vars(model)), [None if d is None else d.tolist() for d in deltas]


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", NAMES)
def test_afterwards_the_model_is_as_it_was(name: str, implementation: str) -> None:
    model, _ = build(name)
    model.set_attn_implementation(implementation)
    inputs, other = asked(name), asked(name, WHY, seed=3)
    want, before = generate(model, inputs), state(model)
    for fails in (False, True):
        try:
            with get_method("windowquant", window_size=8, sensitivity="online").bind(model) as bound:
                generate(model, bound.resume(bound.encode(other), other), num_beams=2)
                if fails:
                    raise KeyboardInterrupt
        except KeyboardInterrupt:
            assert fails
        assert state(model) == before
        assert same_steps(generate(model, inputs), want)


def test_two_models_bound_at_once_do_not_touch_each_other() -> None:
    first, second = loaded("llava_onevision")[0], loaded("qwen2_vl")[0]
    ask, other = asked("llava_onevision"), asked("qwen2_vl")
    with get_method(**WINDOWQUANT).bind(first) as bound:
        alone = generate(first, bound.resume(bound.encode(ask), ask))
    with get_method(**WINDOWQUANT).bind(second) as bound:
        other_alone = generate(second, bound.resume(bound.encode(other), other))
    a, b = get_method(**WINDOWQUANT).bind(first), get_method(**WINDOWQUANT).bind(second)
    a.__enter__()
    cache = a.encode(ask)
    b.__enter__()
    other_cache = b.encode(other)
    assert same_steps(generate(first, a.resume(cache, ask)), alone)
    a.__exit__(None, None, None)  # not in the order of a stack
    assert same_steps(generate(second, b.resume(other_cache, other)), other_alone)
    b.__exit__(None, None, None)
    assert not any(m._forward_pre_hooks for model in (first, second) for m in model.modules())


def test_an_interrupted_pass_can_be_gone_back_from() -> None:
    model, _ = build("llava_onevision")
    inputs, last = asked("llava_onevision"), model.model.language_model.layers[-1]
    with get_method(**WINDOWQUANT).bind(model) as bound:
        cache = bound.encode(inputs)
        want = generate(model, bound.resume(cache, inputs))
        hook = last.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            generate(model, bound.resume(cache, inputs))
        hook.remove()
        assert close_steps(generate(model, bound.resume(cache, inputs)), want)


def test_a_compiled_vision_tower_and_the_model_inside_a_compiled_one_work() -> None:
    model, _ = build("qwen2_vl")
    inputs = asked("qwen2_vl")
    want = generate(model, inputs)
    model.model.visual.merger.compile(backend="eager")
    compiled = torch.compile(model, backend="eager")
    with get_method(**EXACT).bind(compiled._orig_mod) as bound:
        assert torch.equal(generate(model, inputs, bound.new_cache(inputs)).sequences, want.sequences)
