"""Every baseline is found by name, and does what its name says."""

import pytest
import torch

from tests.vlm import tiny_model, video_inputs
from windowquant.core.quantizer import dequantize
from windowquant.method import get_method, method_names
from windowquant.protocols import answer

NAMES = [
    "dynamic",
    "fewer_frames",
    "fp16",
    "hf_fp8",
    "no_video",
    "random_plan",
    "rtn",
    "rtn_int2",
    "rtn_int4",
    "rtn_int8",
    "smoothquant",
    "smoothquant_int4",
    "smoothquant_static",
    "smoothquant_token",
    "uniform",
    "uniform_int2",
    "uniform_int4",
    "windowquant",
]


def test_methods_are_registered_by_being_in_their_place() -> None:
    assert [name for name in method_names() if name in NAMES] == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_method_says_what_it_is(name: str) -> None:
    method = get_method(name)
    assert method.name == name and method.described().startswith(f"{name}(") and method == get_method(name)


@pytest.mark.parametrize(
    ("name", "params", "want"),
    [
        ("uniform_int4", {}, {16: 1 / 33, 4: 32 / 33}),
        ("uniform_int2", {}, {16: 1 / 33, 2: 32 / 33}),
        ("rtn_int2", {}, {16: 1 / 33, 2: 32 / 33}),
        ("uniform", {"bits_per_code": 8}, {16: 1 / 33, 8: 32 / 33}),
        ("uniform", {"bits_per_code": 1}, {16: 1 / 33, 1: 32 / 33}),
        ("uniform_int2", {"window_size": 20}, {16: 13 / 33, 2: 20 / 33}),
        ("uniform_int2", {"window_size": 1}, {2: 1.0}),
        ("fp16", {}, {16: 1.0}),
        ("no_video", {}, {0: 1.0}),
    ],
)
def test_share_of_visual_tokens_per_bit_width(name: str, params, want) -> None:
    model, inputs = tiny_model(), video_inputs()
    with get_method(name, **params).bind(model) as bound:
        assert answer(bound, inputs, "context", 2)[0].bits == pytest.approx(want)


@pytest.mark.parametrize("window_size", [4, 16, 32])
def test_rtn_has_one_scale_for_all_of_a_layers_visual_k_and_one_for_v(window_size: int) -> None:
    model, inputs = tiny_model(), video_inputs()
    layers = []
    for method in (get_method("dynamic"), get_method("rtn_int2", window_size=window_size, kv_dtype="model")):
        with method.bind(model) as bound:
            layers.append(answer(bound, inputs, "paper", 1)[1].cache.layers)
    for exact, layer in zip(*layers, strict=True):
        (segment,) = layer.stored.segments
        for block, x in ((segment.k, exact.keys[0, :, 3:35]), (segment.v, exact.values[0, :, 3:35])):
            assert block.scale.numel() == block.offset.numel() == 1
            step = float(x.max() - x.min()) / 3
            assert float(block.scale) == pytest.approx(step)
            # the integer zero point may clip half a step at the ends
            assert (dequantize(block)[0].flatten(1, 2) - x).abs().max() <= step * 1.001


def test_coarser_is_worse() -> None:
    """KL to the exact cache grows from 8 bits to 1, and from window-and-channel groups to one per tensor."""
    model, inputs = tiny_model(), video_inputs()
    with get_method("fp16", kv_dtype="model").bind(model) as bound:
        reply, session = answer(bound, inputs, "context", 8)
        exact = session.logits(reply.tokens).log_softmax(-1)

    def divergence(**params) -> float:
        with get_method("uniform", window_size=8, **params).bind(model) as bound:
            other = answer(bound, inputs, "context", 1)[1].logits(reply.tokens).log_softmax(-1)
        return float((exact.exp() * (exact - other)).sum(-1).mean())

    by_bits = [divergence(bits_per_code=bits) for bits in (8, 4, 2, 1)]
    assert by_bits == sorted(by_bits)
    assert divergence(bits_per_code=2) < divergence(bits_per_code=2, granularity="tensor")


def test_float_zero_point_is_no_worse_than_the_papers_on_the_values() -> None:
    model, inputs = tiny_model(), video_inputs()
    with get_method("dynamic").bind(model) as bound:
        exact = answer(bound, inputs, "paper", 1)[1].cache.layers[0].values[0, :, 3:35]
    errors = []
    for zero_point in ("integer", "float"):
        method = get_method("uniform_int2", window_size=8, zero_point=zero_point, kv_dtype="model")
        with method.bind(model) as bound:
            (segment,) = answer(bound, inputs, "paper", 1)[1].cache.layers[0].stored.segments
            errors.append(float((dequantize(segment.v)[0].flatten(1, 2) - exact).square().mean()))
    assert 0 < errors[1] <= errors[0]


def test_dynamic_installs_nothing() -> None:
    model = tiny_model()
    with get_method("dynamic").bind(model):
        assert model.config.text_config._attn_implementation == "sdpa"
        assert not model._forward_pre_hooks
    assert torch.is_tensor(model(**video_inputs()).logits)
