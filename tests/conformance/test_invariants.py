"""What holds for quantizers in general, over all methods that have the property.

Elsewhere: the schedules (tests/baselines/test_kivi.py, test_skvq.py, test_stock.py), smoothing that leaves q . k alone
(test_smoothquant.py), permutations and FP8 metadata (test_skvq.py), packing (tests/core/test_packing.py), error bounds
(tests/core), bytes (test_conformance.py).
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.architectures import video_inputs
from tests.conformance.cases import Case, every_method, loaded
from windowquant.cache.packed_cache import PackedCache
from windowquant.cache.streaming.cache import StreamingCache
from windowquant.core.quantizer import dequantize, quantize
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


@pytest.mark.parametrize("granularity", GROUPS)
@pytest.mark.parametrize("zero_point", ["integer", "float", "symmetric"])
def test_a_changed_element_moves_its_own_group_only(granularity: Any, zero_point: Any) -> None:
    x = torch.randn(2, 2, 3, 4, 8, generator=torch.Generator().manual_seed(0))
    y, at = x.clone(), (1, 0, 2, 1, 5)
    y[at] = 40.0
    moved = dequantize(quantize(x, 4, granularity, zero_point)) != dequantize(quantize(y, 4, granularity, zero_point))
    own = torch.zeros_like(moved)
    own[tuple(slice(None) if dim in GROUPS[granularity] else place for dim, place in enumerate(at))] = True
    assert bool(moved[at]) and not bool((moved & ~own).any())


def codes(cache: Any) -> Iterator[Tensor]:
    """Codes of a cache that never codes a token twice, tokens last but one."""
    for layer in cache.layers:
        if isinstance(cache, PackedCache):
            for segment in layer.stored.segments:
                yield from (segment.k.codes, segment.v.codes)
        else:
            for group in layer.groups:
                yield from (track._coded.read(0, track.coded) for track in (group.k, group.v))


@every_method
def test_old_codes_stay_as_they_are(case: Case, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Packed and streaming caches append; transformers' back ends code everything again (test_stock.py)."""
    model, processor = loaded(ARCHITECTURE)
    inputs = video_inputs(ARCHITECTURE, processor)
    with case.method(ARCHITECTURE, tmp_path_factory.mktemp("statistics")).bind(model) as bound:
        session = Session(bound, inputs, "context")
        if not isinstance(session.cache, PackedCache | StreamingCache):
            return
        before = [x.clone() for x in codes(session.cache)]
        for token in range(10, 50):
            session.step(token)
        for old, new in zip(before, codes(session.cache), strict=True):
            if isinstance(session.cache, PackedCache):
                assert torch.equal(old, new)
            else:
                assert torch.equal(old, new[:, :, : old.shape[2]]) and new.shape[2] >= old.shape[2] + 24


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("uniform", [{"bits_per_code": bits, "window_size": 4} for bits in (8, 4, 2, 1)]),
        ("rtn", [{"bits_per_code": bits, "window_size": 4} for bits in (8, 4, 2)]),
        ("rtn", [{"bits_per_code": bits, "window_size": 4, "zero_point": "symmetric"} for bits in (8, 4, 2)]),
        ("kivi", [{"k_bits": bits, "v_bits": bits, "group": 8, "residual": 8} for bits in (8, 4, 2)]),
    ],
    ids=["uniform", "rtn", "rtn symmetric", "kivi"],
)
def test_fewer_bits_are_further_from_exact(name: str, params: list[dict[str, Any]]) -> None:
    model, processor = loaded(ARCHITECTURE)
    inputs = video_inputs(ARCHITECTURE, processor)
    with get_method("fp16", kv_dtype="model").bind(model) as bound:
        reply, session = answer(bound, inputs, "context", 8)
        exact = session.logits(reply.tokens).log_softmax(-1)
    found = []
    for each in params:
        with get_method(name, **each).bind(model) as bound:
            other = Session(bound, inputs, "context").logits(reply.tokens).log_softmax(-1)
        found.append(float((exact.exp() * (exact - other)).sum(-1).mean()))
    assert all(a < b for a, b in pairwise(found)) and found[0] < 0.01
