"""RTN: every bit-width, grouping and kind of zero point against plain formulas on the model's own K and V."""

from itertools import product

import pytest
import torch
from torch import Tensor

from tests.vlm import tiny_model, video_inputs
from windowquant.core.quantizer import dequantize
from windowquant.errors import UserError
from windowquant.method import get_method
from windowquant.protocols import answer

GROUPS = {  # dimensions of [H, W, S, D] within one group
    "tensor": (0, 1, 2, 3),
    "head": (1, 2, 3),
    "channel": (1, 2),
    "token": (3,),
    "token_all": (0, 3),
    "window_channel": (2,),
}
WINDOW = 8


@pytest.fixture(scope="module")
def exact() -> tuple[object, list[tuple[Tensor, Tensor]]]:
    """A model, and its layers' K and V of the whole windows: [H, W, S, D] each."""
    model = tiny_model()
    with get_method("dynamic").bind(model) as bound:
        layers = answer(bound, video_inputs(), "paper", 1)[1].cache.layers
    return model, [tuple(x[0, :, 3:35].unflatten(1, (-1, WINDOW)) for x in (c.keys, c.values)) for c in layers]


def plain(x: Tensor, bits: int, dims: tuple[int, ...], zero_point: str) -> Tensor:
    """Round to nearest in double precision."""
    x = x.double()
    low, high = x.amin(dims, keepdim=True), x.amax(dims, keepdim=True)
    if zero_point == "symmetric":
        half = 2 ** (bits - 1) - 1
        scale = torch.maximum(low.abs(), high.abs()) / half
        return scale * (x / scale).round().clamp(-half, half)
    scale = (high - low) / (2**bits - 1)
    zero = -(low / scale).round() if zero_point == "integer" else -low / scale
    return scale * ((x / scale + zero).round().clamp(0, 2**bits - 1) - zero)


@pytest.mark.parametrize(("granularity", "zero_point"), list(product(GROUPS, ("integer", "float", "symmetric"))))
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_blocks_are_the_plain_formulas(exact, bits: int, granularity: str, zero_point: str) -> None:
    model, layers = exact
    method = get_method(
        "rtn",
        bits_per_code=bits,
        granularity=granularity,
        zero_point=zero_point,
        window_size=WINDOW,
        kv_dtype="model",
    )
    with method.bind(model) as bound:
        reply, session = answer(bound, video_inputs(), "paper", 1)
    groups = 0
    for layer, states in zip(session.cache.layers, layers, strict=True):
        (segment,) = layer.stored.segments
        for block, x in zip((segment.k, segment.v), states, strict=True):
            want = plain(x, bits, GROUPS[granularity], zero_point)
            step = block.scale[0].double()
            # where a value lies between two codes, float32 and double may round apart
            off = (dequantize(block)[0].double() - want).abs() > 1e-4
            assert off.double().mean() < 0.01 and bool(((dequantize(block)[0] - want).abs() <= step * 1.001).all())
            groups += block.scale.numel()
    codes, elements = bits / 8, sum(x.numel() for states in layers for x in states)
    assert reply.kv.codes == codes * elements
    assert reply.kv.scale_zero == groups * 4 * (1 if zero_point == "symmetric" else 2)  # float32 here


@pytest.mark.parametrize(("name", "bits"), [("rtn_int8", 8), ("rtn_int4", 4), ("rtn_int2", 2)])
def test_named_ones_have_one_group_per_tensor(name: str, bits: int) -> None:
    method = get_method(name)
    assert (method.bits_per_code, method.granularity, method.zero_point) == (bits, "tensor", "integer")


def test_symmetric_codes_of_one_bit_are_refused() -> None:
    with pytest.raises(UserError, match="Symmetric codes of 1 bit"):
        get_method("rtn", bits_per_code=1, zero_point="symmetric")
