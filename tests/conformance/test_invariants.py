"""The twelve invariants of quantizers that cost little to test, over everything here that has the property.

They are those of section 12 of the project's notes on baselines, in their order. Literal examples of official codes are
beside each method, in tests/baselines.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise, product
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from baselines.kivi import Kivi
from baselines.smoothquant import LayerFactors
from tests.architectures import video_inputs
from tests.conformance.cases import Case, every_architecture, every_method, generate, loaded, statistics_of
from windowquant.cache.packed_cache import PackedCache
from windowquant.cache.stock import StockQuantizedCache
from windowquant.cache.streaming.cache import StreamingCache
from windowquant.cache.streaming.clusters import ClusterCodec
from windowquant.cache.streaming.codecs import Codec, GroupCodec
from windowquant.cache.streaming.rotation import rotate
from windowquant.cache.streaming.track import Track
from windowquant.calibrate.statistics import load_statistics
from windowquant.core.packing import pack, unpack
from windowquant.core.plan import KVShape
from windowquant.core.quantizer import Granularity, ZeroPoint, dequantize, quantize
from windowquant.core.search import shuffled
from windowquant.core.trits import pack_trits, unpack_trits
from windowquant.errors import UserError
from windowquant.method import get_method
from windowquant.protocols import Session, answer

ARCHITECTURE = "llava_onevision"
GROUPS = {  # granularity: which dimensions of [B, H, W, S, D] an element shares its group along
    "window_channel": {3},
    "token": {4},
    "token_all": {1, 4},
    "channel": {2, 3},
    "head": {2, 3, 4},
    "tensor": {1, 2, 3, 4},
}
MEMBERS = torch.tensor([0, 1, 1, 0, 2, 2, 2, 1, 0, 1, 2, 0, 0, 0, 1, 0])  # of 2 heads of 8 channels, sizes 7, 5, 4
CODECS: dict[str, Callable[[int], Codec]] = {
    "per channel": lambda bits: GroupCodec(bits, 4, "channel"),
    "per token": lambda bits: GroupCodec(bits, 4, "token"),
    "clusters": lambda bits: ClusterCodec(MEMBERS, torch.ones(3), 2**bits, fp8=False),
}


LOSSLESS = {"group": 8, "window": 8, "clip": 1.0, "fp8": False}  # but for the codes; official scales have 3 bits


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("statistics")


def asked(architecture: str = ARCHITECTURE) -> dict[str, Any]:
    return video_inputs(architecture, loaded(architecture)[1])


# 1. Group independence


@pytest.mark.parametrize("granularity", GROUPS)
@pytest.mark.parametrize("zero_point", get_args(ZeroPoint))
def test_01_a_changed_element_moves_its_own_group_only(granularity: Any, zero_point: Any) -> None:
    x = noise(2, 2, 3, 4, 8)
    y, at = x.clone(), (1, 0, 2, 1, 5)
    y[at] = 40.0
    moved = dequantize(quantize(x, 4, granularity, zero_point)) != dequantize(quantize(y, 4, granularity, zero_point))
    own = torch.zeros_like(moved)
    own[tuple(slice(None) if dim in GROUPS[granularity] else place for dim, place in enumerate(at))] = True
    assert bool(moved[at]) and not bool((moved & ~own).any())


@pytest.mark.parametrize("name", CODECS)
def test_01_so_it_does_where_tokens_are_coded_as_they_age(name: str) -> None:
    codec, x = CODECS[name](2), noise(2, 2, 8, 8)
    y = x.clone()
    y[1, 0, 5, 2] = 40.0
    moved = codec.decode(codec.encode(x, "x"), 2) != codec.decode(codec.encode(y, "x"), 2)
    own = torch.zeros_like(moved)
    if name == "per channel":
        own[1, 0, 4:8, 2] = True
    elif name == "per token":
        own[1, 0, 5, 0:4] = True
    else:
        own[1, :, 5] = MEMBERS.eq(1).view(2, 8)
    assert bool(moved[1, 0, 5, 2]) and not bool((moved & ~own).any())


# 2. Append-only


def codes(cache: Any) -> Iterator[Tensor]:
    """Codes of a cache that never codes a token twice, tokens last but one."""
    for layer in cache.layers:
        if isinstance(cache, PackedCache):
            for segment in layer.stored.segments:
                yield from (segment.k.codes, segment.v.codes)
        else:
            for group in layer.groups:
                yield from (track._coded.parts()[0] for track in (group.k, group.v))


@every_method
def test_02_old_codes_stay_as_they_are(case: Case, folder: Path) -> None:
    """Packed and streaming caches only append. Transformers' back ends with a residual code everything again."""
    model, _ = loaded(ARCHITECTURE)
    with case.method(ARCHITECTURE, folder).bind(model) as bound:
        session = Session(bound, asked(), "context")
        cache = session.cache
        if not isinstance(cache, PackedCache | StreamingCache | StockQuantizedCache):
            return
        stock = isinstance(cache, StockQuantizedCache)
        before = [layer._quantized_keys for layer in cache.layers] if stock else [x.clone() for x in codes(cache)]
        for step in range(140 if stock else 40):
            session.step(10 + step % 50)
        after = [layer._quantized_keys for layer in cache.layers] if stock else list(codes(cache))
        for old, new in zip(before, after, strict=True):
            if stock:
                assert new is not old, "all of it is a new tensor"
            elif isinstance(cache, PackedCache):
                assert torch.equal(old, new)
            else:
                assert torch.equal(old, new[:, :, : old.shape[2]]) and new.shape[2] > old.shape[2]


# 3. Schedules

KIVI_STEPS = {  # prefill: after how many further tokens (K coded, K exact, V coded, V exact), at a residual of 128
    100: {0: (0, 100, 0, 100), 28: (128, 0, 0, 128)},
    128: {0: (128, 0, 0, 128)},
    129: {0: (128, 1, 1, 128)},
    256: {0: (256, 0, 128, 128)},
    300: {0: (256, 44, 172, 128), 84: (384, 0, 256, 128), 90: (384, 6, 262, 128)},
}
SKVQ_STEPS = {  # the same of both: sinks, coded, window of 128
    3: {0: (3, 0, 0), 4: (5, 0, 2)},
    133: {0: (5, 0, 128), 1: (5, 1, 128)},
    300: {0: (5, 167, 128), 50: (5, 217, 128)},
}


@pytest.mark.parametrize("prefill", KIVI_STEPS)
def test_03_kivis_schedule(prefill: int) -> None:
    schemes = Kivi().schemes(None, KVShape(1, 32))(0)  # type: ignore[arg-type]
    x = noise(1, 1, prefill + 91, 32)
    tracks = [Track(scheme, x[:, :, :prefill], "x", 0) for scheme in schemes]
    for step in range(91):
        if step in KIVI_STEPS[prefill]:
            found = tuple(count for track in tracks for count in (track.coded, track.length - track.coded))
            assert found == KIVI_STEPS[prefill][step]
        for track in tracks:
            track.append(x[:, :, prefill + step : prefill + step + 1])


@pytest.mark.parametrize("prefill", SKVQ_STEPS)
def test_03_skvqs_schedule(prefill: int, folder: Path) -> None:
    method = get_method("skvq", group=8, statistics=str(statistics_of(ARCHITECTURE, folder)))
    scheme = method.schemes(loaded(ARCHITECTURE)[0], KVShape(2, 8))(0)[0]  # type: ignore[attr-defined]
    x = noise(1, 2, prefill + 51, 8)
    track = Track(scheme, x[:, :, :prefill], "x", 0)
    for step in range(51):
        if step in SKVQ_STEPS[prefill]:
            sinks = track._first.shape[2]
            assert (sinks, track.coded, track.length - track.coded - sinks) == SKVQ_STEPS[prefill][step]
        track.append(x[:, :, prefill + step : prefill + step + 1])


@every_method
def test_03_the_back_ends_schedule(case: Case, folder: Path) -> None:
    """The whole first update is coded; then everything at every `residual_length` tokens (fp8: each at once)."""
    model, _ = loaded(ARCHITECTURE)
    if not case.name.startswith("hf_"):
        return
    options = {} if case.name == "hf_fp8" else {**case.params, "residual_length": 4}
    with get_method(case.name, **options).bind(model) as bound:
        session = Session(bound, asked(), "paper")
        layer, prompt = session.cache.layers[0], session.prompt.length
        for step in range(1, 10):
            session.step(7)
            waiting = 0 if layer.keys.dim() < 4 else layer.keys.shape[2]
            assert waiting == (0 if case.name == "hf_fp8" else step % 4)
            assert session.cache.get_seq_length() == prompt + step


# 4. No group of a single token


@every_method
def test_04_a_scale_of_a_channel_serves_several_tokens(case: Case, folder: Path) -> None:
    """A channel of one token alone would be exact by construction, and a wrong schedule would look perfect."""
    model, _ = loaded(ARCHITECTURE)
    with case.method(ARCHITECTURE, folder).bind(model) as bound:
        session = Session(bound, asked(), "context")
        if isinstance(session.cache, PackedCache):
            blocks = [block for layer in session.cache.layers for block in layer.stored.blocks()]
            shared = [block for block in blocks if block.granularity in ("window_channel", "channel")]
            assert all(block.shape[3] > 1 for block in shared)
        for _ in range(40 if isinstance(session.cache, StreamingCache) else 0):
            session.step(9)
            groups = [group for layer in session.cache.layers for group in layer.groups]
            for track in (track for group in groups for track in (group.k, group.v)):
                codec = track._coded.codec
                if isinstance(codec, GroupCodec) and codec.axis == "channel" and track.coded:
                    assert codec.group > 1 and track._coded.parts()[1].shape[2] * codec.group == track.coded


# 5. Error bound


@pytest.mark.parametrize(
    ("granularity", "zero_point", "bits"), [*product(get_args(Granularity), get_args(ZeroPoint), (8, 4, 2))]
)
def test_05_errors_are_half_a_step_and_constant_groups_finite(granularity: Any, zero_point: Any, bits: int) -> None:
    x = noise(2, 2, 3, 4, 8).half()
    x[0, 0, 0, 0, 0] = 0.0
    coded = quantize(x, bits, granularity, zero_point)
    error = (dequantize(coded) - x.float()).abs()
    # an integer zero point moves the range by up to half a step, at whose end codes are cut off
    steps = 1.0 if zero_point == "integer" else 0.5
    assert float(error.max()) <= steps * float(coded.scale.max()) * 1.01 + 1e-3
    for value in (0.0, 3.0, -1000.0):
        flat = dequantize(quantize(torch.full_like(x, value), bits, granularity, zero_point))
        assert bool(flat.isfinite().all()) and (value or bool((flat == 0).all()))
    if zero_point == "symmetric":
        assert float(dequantize(coded)[0, 0, 0, 0, 0]) == 0.0


@pytest.mark.parametrize("name", CODECS)
def test_05_so_it_is_where_tokens_are_coded_as_they_age(name: str) -> None:
    codec, x = CODECS[name](4), noise(2, 2, 8, 8).half()
    parts = codec.encode(x, "x")
    assert float((codec.decode(parts, 2) - x.float()).abs().max()) <= 0.51 * float(parts[1].max())
    flat = codec.decode(codec.encode(torch.full_like(x, 0.7), "x"), 2)
    torch.testing.assert_close(flat.half(), torch.full_like(x, 0.7), atol=2e-5, rtol=0)


# 6. Monotone


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("uniform", [{"bits_per_code": bits, "window_size": 4} for bits in (8, 4, 2, 1)]),
        ("rtn", [{"bits_per_code": bits, "window_size": 4} for bits in (8, 4, 2)]),
        ("rtn", [{"bits_per_code": bits, "window_size": 4, "zero_point": "symmetric"} for bits in (8, 4, 2)]),
        ("kivi", [{"k_bits": bits, "v_bits": bits, "group": 8, "residual": 8} for bits in (8, 4, 2)]),
        ("skvq", [{"k_bits": bits, "v_bits": bits, **LOSSLESS} for bits in (8.0, 4.0, 2.0, 1.5)]),
    ],
    ids=["uniform", "rtn", "rtn symmetric", "kivi", "skvq"],
)
def test_06_fewer_bits_are_further_from_exact(name: str, params: list[dict[str, Any]], folder: Path) -> None:
    """16 bits that are exactly the default cache's: test_conformance.py."""
    model, inputs = loaded(ARCHITECTURE)[0], asked()
    with get_method("fp16", kv_dtype="model").bind(model) as bound:
        reply, session = answer(bound, inputs, "context", 8)
        exact = session.logits(reply.tokens).log_softmax(-1)
    found = []
    calibrated = {"statistics": str(statistics_of(ARCHITECTURE, folder))} if name == "skvq" else {}
    for each in params:
        with get_method(name, **each, **calibrated).bind(model) as bound:
            other = Session(bound, inputs, "context").logits(reply.tokens).log_softmax(-1)
        found.append(float((exact.exp() * (exact - other)).sum(-1).mean()))
    assert all(a < b for a, b in pairwise(found)) and found[0] < 0.01


# 7. What is done to K and Q, or to V and the output, cancels. (No method here multiplies by Hadamard matrices.)


@every_architecture
def test_07_smoothing_leaves_products_alone(architecture: str, folder: Path) -> None:
    model, inputs = loaded(architecture)[0], asked(architecture)
    found, want = load_statistics(model, str(statistics_of(architecture, folder))), generate(model, inputs)
    layers = [module for module in model.modules() if hasattr(module, "k_proj") and hasattr(module, "o_proj")]
    for index, attention in enumerate(layers):
        factors = LayerFactors.calibrated(found, index, attention, 0.5)
        q, k = noise(2, 5, 8, seed=1), noise(2, 5, 8, seed=2)
        divided = (q * factors.k[:, None]) @ (k / factors.k[:, None]).mT
        torch.testing.assert_close(divided, q @ k.mT, atol=1e-4, rtol=1e-4)
        assert float(factors.k.std()) > 0
    method = get_method(
        "smoothquant", window_size=1000, kv_dtype="model", statistics=str(statistics_of(architecture, folder))
    )
    with method.bind(model) as bound, pytest.warns(UserWarning, match="window_size 1000 is larger"):
        have = generate(model, inputs, bound.cache_keyword, bound.new_cache(inputs))
    torch.testing.assert_close(torch.stack(have.logits), torch.stack(want.logits), atol=1e-4, rtol=1e-3)


def test_07_rope_is_taken_off_and_put_on_again() -> None:
    angles = noise(1, 1, 6, 4, seed=3).repeat(1, 1, 1, 2)
    cos, sin = angles.cos(), angles.sin()
    k, q = noise(1, 2, 6, 8, seed=1), noise(1, 2, 6, 8, seed=2)
    torch.testing.assert_close(rotate(rotate(k, cos, sin), cos, -sin), k, atol=1e-5, rtol=1e-5)
    products = [(x * y).sum(-1) for x, y in ((q, k), (rotate(q, cos, sin), rotate(k, cos, sin)))]
    torch.testing.assert_close(*products, atol=1e-5, rtol=1e-5)


# 8. Permutation


@every_architecture
def test_08_clusters_are_a_permutation_of_all_channels(architecture: str, folder: Path) -> None:
    """SKVQ brings each cluster's channels together and puts them back."""
    method = get_method("skvq", group=4, statistics=str(statistics_of(architecture, folder)))
    schemes = method.schemes(loaded(architecture)[0], KVShape(2, 8))  # type: ignore[attr-defined]
    for scheme in (scheme for layer in range(2) for scheme in schemes(layer)):
        codec = scheme.codec
        assert sum(codec.sizes) == 16 and min(codec.sizes) > 0
        order = codec._order
        assert torch.equal(order[order.argsort()], torch.arange(16)) and len(set(order.tolist())) == 16
        members = codec.members[order].tolist()
        assert members == sorted(members)


@every_method
def test_08_windows_of_one_width_are_brought_together_and_every_token_is_there_once(case: Case, folder: Path) -> None:
    """Algorithm 2: each column is stored once, whatever the order (none of the visual ones where they are dropped)."""
    model, _ = loaded(ARCHITECTURE)
    with case.method(ARCHITECTURE, folder).bind(model) as bound:
        session = Session(bound, asked(), "paper")
        if not isinstance(session.cache, PackedCache):
            return
        visual = set(session.prompt.visual_positions[0].tolist())
        dropped = {"no_video": visual, "no_span": set(range(min(visual), max(visual) + 1))}.get(case.name, set())
        for layer in session.cache.layers:
            order = layer._prefix_order()[0].tolist()
            assert sorted(order) == sorted(set(range(session.prompt.length)) - dropped)


# 9. Packing


@pytest.mark.parametrize("tokens", [1, 3, 7, 8])
@pytest.mark.parametrize("bits", [8, 4, 2, 1])
def test_09_packed_codes_come_back(bits: int, tokens: int) -> None:
    codes = torch.randint(0, 2**bits, (2, 3, tokens, 24), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    packed = pack(codes, bits)
    assert packed.numel() * 8 == codes.numel() * bits and torch.equal(unpack(packed, bits), codes)


@pytest.mark.parametrize("channels", [1, 4, 5, 7, 31])
def test_09_three_levels_come_back_at_five_a_byte(channels: int) -> None:
    codes = torch.randint(0, 3, (2, 3, channels), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    packed = pack_trits(codes)
    assert packed.shape[-1] == -(-channels // 5) and torch.equal(unpack_trits(packed, channels), codes)


# 10. Bits are counted from real bytes (of whole caches: test_conformance.py)


@pytest.mark.parametrize(
    ("codec", "bits"),
    [
        (GroupCodec(2, 32, "channel"), 3.0),
        (GroupCodec(2, 64, "channel"), 2.5),
        (GroupCodec(2, 128, "token"), 2.25),
        (GroupCodec(4, 32, "token"), 5.0),
        (ClusterCodec(torch.arange(512) // 128, torch.ones(4), 4, fp8=True), 2.125),
        (ClusterCodec(torch.arange(512) // 64, torch.ones(8), 4, fp8=True), 2.25),
        (ClusterCodec(torch.arange(512) // 32, torch.ones(16), 4, fp8=False), 3.0),
    ],
)
def test_10_published_bits_an_element(codec: Codec, bits: float) -> None:
    x = noise(1, 4, 128, 128).half()
    held = sum(part.numel() * part.element_size() for part in codec.encode(x, "x"))
    assert 8 * held / x.numel() == bits == codec.token_bits(4, 128) / 512


# 11. Metadata dtype


def test_11_fp8_scales_change_what_is_read_and_no_code() -> None:
    x, found = noise(1, 2, 6, 8).half(), []
    for fp8 in (False, True):
        codec = ClusterCodec(MEMBERS, torch.full((3,), 0.92), 4, fp8)
        parts = codec.encode(x, "x")
        found.append((parts[0], codec.decode(parts, 2)))
    assert torch.equal(found[0][0], found[1][0]) and not torch.equal(found[0][1], found[1][1])


# 12. Budget conservation. The note's equation is SqueezeAttention's, which shares a budget of tokens among layers and
# which no method here does. What does share a budget here: target_bits, among windows; and random_plan, which deals
# out what WindowQuant planned.


@every_architecture
def test_12_a_budget_is_kept_and_one_out_of_reach_is_refused(architecture: str) -> None:
    model, inputs = loaded(architecture)[0], asked(architecture)
    options = {"window_size": 4, "sensitivity": (0.45, 0.6)}

    def plan_of(name: str, **params: Any) -> Any:
        with get_method(name, **options, **params).bind(model) as bound:
            return answer(bound, inputs, "context", 1)[0].plan

    for target in (13.0, 14.0):  # scale and offset of 4 tokens take 8 bits more an element
        with get_method("windowquant", **options, target_bits=target).bind(model) as bound:
            reply, session = answer(bound, inputs, "context", 1)
        widths = [width for layer in reply.plan.bits for width in layer]
        assert sum(width if width == 16 else width + 8 for width in widths) / len(widths) <= target
    with pytest.raises(UserError, match="target_bits is 12, but alpha reaches"):
        plan_of("windowquant", target_bits=12.0)
    own, drawn = plan_of("windowquant"), plan_of("random_plan")
    assert [sorted(layer) for layer in own.bits] == [sorted(layer) for layer in drawn.bits]
    tensor = torch.tensor(own.bits)
    assert torch.equal(shuffled(tensor, 5, True).sort(-1).values, tensor.sort(-1).values)
