"""Transformers' quantized caches: their own arithmetic and schedule, and our count of what they hold."""

from itertools import pairwise

import pytest
import torch
from transformers import Qwen2Config
from transformers.utils import is_hqq_available, is_optimum_quanto_available

from tests.vlm import tiny_model, video_inputs
from windowquant.cache.kv_bytes import kv_bytes, visual_bits
from windowquant.errors import UserError
from windowquant.method import get_method
from windowquant.protocols import answer

needs_quanto = pytest.mark.skipif(not is_optimum_quanto_available(), reason="optimum-quanto is not installed")
needs_hqq = pytest.mark.skipif(not is_hqq_available(), reason="hqq is not installed")
A, B, C, E = [-1, 0, 0.5, 2], [0.1, -0.37, 1.25, 0.8], [0, 0.5, 1.5, 3], [-3, -1, 0.2, 9]
BACKENDS = [
    pytest.param("hf_quanto", {"q_group_size": 8}, marks=needs_quanto, id="quanto"),
    pytest.param("hf_hqq", {"q_group_size": 8}, marks=needs_hqq, id="hqq"),
    pytest.param("hf_fp8", {}, id="fp8"),
]


def config(heads: int = 1) -> Qwen2Config:
    return Qwen2Config(num_hidden_layers=1, num_attention_heads=heads, num_key_value_heads=heads, hidden_size=4 * heads)


def made(name: str, heads: int = 1, **params):
    """A cache of one layer whose model is bound."""
    return get_method(name, **params).make_cache(config(heads))


@pytest.fixture(autouse=True)
def prepared():
    """What a bound quanto needs."""
    if not is_optimum_quanto_available():
        yield
        return
    with get_method("hf_quanto").bind(tiny_model()):
        yield


def rows(*values: list[float]) -> torch.Tensor:
    return torch.tensor(values)[None, None].float()


@needs_quanto
def test_quantos_example() -> None:
    cache = made("hf_quanto", nbits=2, q_group_size=4)
    x = rows(A, B)
    assert torch.equal(cache.update(x, x, 0)[0], x)  # the first forward pass sees exact values
    stored = cache.layers[0]._quantized_keys
    assert stored._data._data.flatten().tolist() == [4, 1, 14, 11]
    assert stored._scale.flatten().tolist() == pytest.approx([1, 0.54])
    assert stored._shift.flatten().tolist() == pytest.approx([1, 0.37])
    back = cache.update(x[:, :, :1], x[:, :, :1], 0)[0][0, 0, :2]
    torch.testing.assert_close(back, torch.tensor([[-1, 0, 1, 2], [0.17, -0.37, 1.25, 0.71]]))


@needs_quanto
@pytest.mark.parametrize(("axis", "want"), [(0, [(1, 2)]), (-1, [(0, 4), (0, 5), (1, 0), (1, 1)])])
def test_quantos_groups(axis: int, want: list[tuple[int, int]]) -> None:
    """One element of head 1 is changed: axis 0 moves its token only, axis -1 its group of (h, t) rows."""
    torch.manual_seed(0)
    x = torch.rand(1, 2, 6, 4)
    y = x.clone()
    changed = want[0] if axis == 0 else want[-1]
    y[0, changed[0], changed[1], 0] = 30.0
    cache = [made("hf_quanto", heads=2, q_group_size=4, axis_key=axis, axis_value=axis) for _ in range(2)]
    back = []
    for each, data in zip(cache, (x, y), strict=True):
        each.update(data, data, 0)
        back.append(each.layers[0]._quantized_keys.dequantize()[0])
    moved = (back[0] != back[1]).any(-1).nonzero().tolist()
    assert set(map(tuple, moved)) <= set(want) and list(changed) in moved


@needs_hqq
def test_hqqs_example() -> None:
    """With its refinement of the zero points, which is on by default."""
    cache = made("hf_hqq", nbits=2, q_group_size=4)
    x = rows(A, B, C, E)
    cache.update(x, x, 0)
    codes, meta = cache.layers[0]._quantized_keys
    assert codes.flatten().tolist() == [16, 65, 185, 239]
    assert meta["scale"].flatten().tolist() == pytest.approx([1, 0.54, 1, 4], abs=1e-5)
    assert meta["zero"].flatten().tolist() == pytest.approx([1.039066, 0.675926, 0, 0.762583], abs=2e-3)
    back = cache.layers[0]._dequantize((codes, meta))[0, 0]
    want = torch.tensor([[-1.039066, -0.039066, 0.960934, 1.960934], [-3.050334, 0.949666, 0.949666, 8.949666]])
    torch.testing.assert_close(back[[0, 3]], want, atol=1e-2, rtol=0)


def test_fp8s_example() -> None:
    """The scale of the first update stays: later values beyond it are cut."""
    cache = made("hf_fp8")
    first = rows([2, 0, 0, 0])
    cache.update(first, first, 0)
    later = rows([2.2, -4, 0.3, 100])
    assert cache.update(later, later, 0)[0][0, 0, 1].tolist() == pytest.approx([2, -2, 0.285714, 2], abs=1e-5)


@pytest.mark.parametrize(("name", "params"), BACKENDS[:2])
def test_the_schedule(name: str, params) -> None:
    """Residual of 4, five tokens at first: quantized and residual lengths step by step."""
    cache = made(name, heads=2, residual_length=4, q_group_size=4)
    x = torch.randn(1, 2, 5, 4)
    cache.update(x, x, 0)
    lengths = []
    for _ in range(8):
        one = torch.randn(1, 2, 1, 4)
        cache.update(one, one, 0)
        residual = cache.layers[0].keys.shape[-2] if cache.layers[0].keys.dim() == 4 else 0
        lengths.append((cache.get_seq_length() - residual, residual))
    assert lengths == [(5, 1), (5, 2), (5, 3), (9, 0), (9, 1), (9, 2), (9, 3), (13, 0)]


@needs_quanto
def test_requantizing_unchanged_groups_is_idempotent_along_axis_0() -> None:
    cache = made("hf_quanto", nbits=2, q_group_size=4, residual_length=2)
    x = torch.randn(1, 1, 6, 4)
    cache.update(x, x, 0)
    before = cache.layers[0]._quantized_keys.dequantize()
    for _ in range(4):
        cache.update(torch.randn(1, 1, 1, 4), torch.randn(1, 1, 1, 4), 0)
    torch.testing.assert_close(cache.layers[0]._quantized_keys.dequantize()[:, :, :6], before, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("name", "params", "bits"),
    [
        pytest.param("hf_quanto", {"nbits": 4}, 4 + 64 / 8, marks=needs_quanto),  # scale and shift of float32 here
        pytest.param("hf_quanto", {"nbits": 2}, 2 + 64 / 8, marks=needs_quanto),
        pytest.param("hf_hqq", {"nbits": 4}, 4 + 64 / 8, marks=needs_hqq),
        pytest.param("hf_fp8", {}, 8, marks=()),
    ],
)
def test_bits_are_those_of_the_tensors_held(name: str, params, bits: float) -> None:
    model, inputs = tiny_model(), video_inputs()
    group = {} if name == "hf_fp8" else {"q_group_size": 8}
    with get_method(name, **group, **params).bind(model) as bound:
        reply, session = answer(bound, inputs, "context", 8)
    assert reply.average_bits == visual_bits(session.cache, 33) == pytest.approx(bits, rel=0.01)
    prefilled, later = 36, 7 + 7  # up to the newline; the question, and the answer but for its last token
    elements = 2 * 2 * 2 * 8  # layers, K and V, heads, channels
    tail = 0 if name == "hf_fp8" else later * elements * 4
    tokens = prefilled + (later if name == "hf_fp8" else 0)
    assert kv_bytes(session.cache).total == pytest.approx(tokens * elements * bits / 8 + tail, rel=0.01)


@pytest.mark.parametrize(("name", "params"), BACKENDS)
@pytest.mark.parametrize("protocol", ["context", "paper", "cached"])
def test_the_whole_prefill_is_quantized_under_every_protocol(name: str, params, protocol: str) -> None:
    model, inputs = tiny_model(), video_inputs()
    with get_method("dynamic").bind(model) as bound:
        exact = answer(bound, inputs, protocol, 6)[1].cache
    with get_method(name, **params).bind(model) as bound:
        reply, session = answer(bound, inputs, protocol, 6)
        again = session.logits(reply.tokens)
        assert again.argmax(-1).tolist() == reply.tokens
        held = kv_bytes(session.cache)
    late = {"context": 12, "paper": 5, "cached": 6}[protocol]
    if name != "hf_fp8":
        assert held.tail == late * 2 * 2 * 2 * 8 * 4
    assert held.total < kv_bytes(exact).total


@needs_quanto
def test_fewer_bits_are_further_from_exact() -> None:
    model, inputs = tiny_model(), video_inputs()
    with get_method("dynamic").bind(model) as bound:
        reply, session = answer(bound, inputs, "context", 6)
        exact = session.logits(reply.tokens).log_softmax(-1)

    def divergence(name: str, **params) -> float:
        with get_method(name, **params).bind(model) as bound:
            other = answer(bound, inputs, "context", 1)[1].logits(reply.tokens).log_softmax(-1)
        return float((exact.exp() * (exact - other)).sum(-1).mean())

    order = [divergence("hf_fp8"), *(divergence("hf_quanto", q_group_size=8, nbits=bits) for bits in (4, 2))]
    assert all(a < b for a, b in pairwise(order))


@needs_quanto
def test_a_group_that_does_not_fit_is_refused_in_one_sentence() -> None:
    model = tiny_model()
    method = get_method("hf_quanto", axis_key=-1, axis_value=-1, q_group_size=64)
    with (
        method.bind(model) as bound,
        pytest.raises(UserError, match="quanto back end cannot quantize K and V of shape"),
    ):
        answer(bound, video_inputs(), "context", 2)
    with pytest.raises(UserError, match="hf_quanto cannot be used here: .*nbits"):
        get_method("hf_quanto", nbits=3).bind(tiny_model())
    with pytest.raises(UserError, match="'hf_fp8' has no hyper-parameter 'window_size'; it has none"):
        get_method("hf_fp8", window_size=8)


@needs_quanto
def test_a_missing_back_end_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.cache_utils.is_optimum_quanto_available", lambda: False)
    with pytest.raises(UserError, match=r"hf_quanto cannot be used here \(pip install 'windowquant\[stock\]'\)"):
        get_method("hf_quanto").bind(tiny_model())
