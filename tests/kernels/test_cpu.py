"""The CPU backend where it differs in kind from the others; what they share is in test_reference.py.

Each number of query rows at a time and each kv dtype is compiled apart, which takes seconds, so all but float16 is
tested with groups of seven. All is tested with products of floats, and of integers where the processor has tiles.
"""

import gc
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numba
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.build import Case, Shape, build, causal, plain_attention, queries, relative_error
from tests.kernels.drawn import Drawn, drawn
from windowquant.core.packed import PackedLayer
from windowquant.core.quantizer import Granularity
from windowquant.errors import UserError
from windowquant.kernels import reference
from windowquant.kernels.cpu import attention, compiled, table, threads
from windowquant.kernels.cpu.amx import available
from windowquant.kernels.cpu.attention import attend

FLOATS, INTEGERS = 1e-5, 4e-4
"""Tolerances."""


@pytest.fixture(scope="module", params=[FLOATS, INTEGERS], ids=["floats", "integers"], autouse=True)
def tolerance(request: pytest.FixtureRequest) -> Iterator[float]:
    """That of the products which are used meanwhile."""
    if request.param == INTEGERS and not available():
        pytest.skip("the processor has no tiles for integers, or they may not be used")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_by_integers", lambda q: request.param == INTEGERS)
        yield request.param


def _error(case: Case, shape: Shape, count: int, mask: Tensor | None = None) -> float:
    q, scaling = queries(shape, count), shape.channels**-0.5
    expected = plain_attention(q, case, causal(count, case.k.shape[2]) if mask is None else mask, scaling)
    return relative_error(attend(q, case.layer, mask, scaling), expected)


SIZES = st.sampled_from([1, 5, 16, 32, 33, 70])


@settings(max_examples=80, deadline=None)
@given(drawn(6, SIZES, (8, 24, 64, 80, 128), st.integers(4, 40), 4, (torch.float16,), masked=st.booleans()))
def test_any_layer(tolerance: float, one: Drawn) -> None:
    case, mask = one.made()
    assert _error(case, one.shape, one.count, mask) <= tolerance


@pytest.mark.parametrize("granularity", get_args(Granularity))
@pytest.mark.parametrize("channels", [24, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_other_dtypes(granularity: Granularity, channels: int, dtype: torch.dtype, tolerance: float) -> None:
    shape = Shape(group=7, channels=channels, window=32, tail=3)
    assert _error(build(shape, (16, 8, 4, 2, 1, 2), granularity, dtype=dtype), shape, 1) <= tolerance
    apart = build(shape, (16, 8, 4), granularity, dtype=dtype, v_bits=(2, 16, 16), in_place=True)
    assert _error(apart, shape, 1) <= tolerance


@pytest.mark.parametrize("granularity", get_args(Granularity))
@pytest.mark.parametrize("channels", [32, 80])
def test_symmetric_codes(granularity: Granularity, channels: int, tolerance: float) -> None:
    shape = Shape(batch=2, channels=channels, window=32)
    assert _error(build(shape, (8, 4, 2, 4), granularity, "symmetric", in_place=True), shape, 1) <= tolerance


@pytest.mark.parametrize("window", [64, 300])
def test_windows_longer_than_what_is_scored_together(window: int, tolerance: float) -> None:
    shape = Shape(group=7, channels=64, window=window)
    assert _error(build(shape, (4, 2, 2)), shape, 1) <= tolerance


@pytest.mark.parametrize("value", [5.97e-8, 3e-5, -6.1e-5, 60000.0])
def test_smallest_and_largest_16_bit_values(value: float) -> None:
    """Subnormal numbers of float16 too."""
    shape = Shape(group=1)
    case = build(shape, ())
    case.layer.fp_k.fill_(1e-3)
    case.layer.fp_v.fill_(value)
    got = attend(queries(shape, 1), case.layer, None, 0.2)
    torch.testing.assert_close(got, torch.full_like(got, float(case.layer.fp_v[0, 0, 0, 0])), atol=0, rtol=1e-6)


def test_scores_far_apart() -> None:
    """Exponentials vanish, and the output so far is taken down, by any amount."""
    shape = Shape(group=7, window=32, channels=64)
    case = build(shape, (2,) * 20, shuffle=False)
    q = queries(shape, 1)
    expected = plain_attention(q, case, causal(1, case.k.shape[2]), 40.0)
    assert relative_error(attend(q, case.layer, None, 40.0), expected) <= 5e-4  # float32 scores of up to 10,000


@pytest.mark.parametrize("openmp", [True, False])
@pytest.mark.parametrize("parts", [1, 2, 3, 7, 50])
def test_any_number_of_threads_gives_one_result(
    parts: int, openmp: bool, monkeypatch: pytest.MonkeyPatch, tolerance: float
) -> None:
    shape = Shape(batch=2, group=7, window=8)
    case = build(shape, (4, 2, 2, 16, 2, 8, 4, 2))
    monkeypatch.setattr(attention, "_GRAIN", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: parts)
    if not openmp:
        monkeypatch.setattr(threads, "_region", lambda: None)
    ran: list[int] = []

    def counted(function: int, argument: int, count: int) -> None:
        ran.append(count)
        threads.run(function, argument, count)

    monkeypatch.setattr(attention, "run", counted)
    assert _error(case, shape, 1) <= tolerance
    assert ran == [min(parts, 2 * 2 * 8)]  # 7 windows and the 16-bit block, of 2 heads in 2 requests


def test_fewer_threads_than_parts_do_all_of_them(monkeypatch: pytest.MonkeyPatch, tolerance: float) -> None:
    """As OpenMP may have it."""
    shape = Shape(batch=2, group=7, window=8)
    case = build(shape, (4, 2, 2, 16, 2, 8, 4, 2))
    monkeypatch.setattr(attention, "_GRAIN", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 9)
    monkeypatch.setattr(attention, "run", lambda function, argument, count: threads.run(function, argument, 2))
    assert _error(case, shape, 1) <= tolerance


def test_calls_from_several_threads_at_once() -> None:
    shape = Shape(heads=4, group=7, window=32, channels=64)
    cases = [build(shape, (2, 4, 2, 16) * 8, seed=seed) for seed in range(4)]
    q = queries(shape, 1)
    expected = [attend(q, case.layer, None, 0.2) for case in cases]
    wrong: list[int] = []

    def work(index: int) -> None:
        for _ in range(20):
            if not torch.equal(attend(q, cases[index].layer, None, 0.2), expected[index]):
                wrong.append(index)

    running = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert wrong == []


def test_torchs_own_threads_are_found() -> None:
    assert threads._region() is not None


def test_nothing_of_the_size_of_k_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by torch nor in a thread's workspace, which does not grow with the tokens."""
    made: list[int] = []
    for name in ("empty", "zeros"):
        original = getattr(torch, name)

        def recorded(*args: object, original: object = original, **kwargs: object) -> Tensor:
            result: Tensor = original(*args, **kwargs)  # type: ignore[operator]
            made.append(result.numel())
            return result

        monkeypatch.setattr(torch, name, recorded)
    shape = Shape(channels=64, window=32)
    case = build(shape, (4,) * 60 + (2,) * 60)
    attend(queries(shape, 1), case.layer, None, 0.2)
    assert made and max(made) < case.k.numel() // 4


def test_table_of_segments_is_made_once_and_freed_with_them() -> None:
    gc.collect()  # what earlier tests left would go meanwhile
    case = build(Shape(group=7, channels=64), (4, 2, 2))
    q, layer, made = queries(Shape(group=7, channels=64), 1), case.layer, len(table._known)
    attend(q, layer, None, 0.2)
    first = table._known[layer.segments[0]]
    attend(q, replace(layer, fp_k=layer.fp_k[:, :, 1:], fp_v=layer.fp_v[:, :, 1:], order=layer.order[:, 1:]), None, 0.2)
    assert table._known[layer.segments[0]] is first
    attend(q, replace(layer, segments=layer.segments[:2]), None, 0.2)
    assert table._known[layer.segments[0]] is not first
    gone = weakref.ref(layer.segments[0])
    del case, layer, first
    gc.collect()
    assert gone() is None and len(table._known) == made


def test_tokens_are_read_from_where_they_have_moved_to(tolerance: float) -> None:
    """A growing buffer: more tokens in place, then all of them in a larger one."""
    shape = Shape(group=7, channels=64, tail=40)
    case = build(shape, (4, 2, 2))
    layer, q = case.layer, queries(shape, 1)
    for count in (3, 32, 33, 40):
        rest = layer.fp_k.shape[2] - count
        order = layer.order[:, : layer.order.shape[1] - rest]
        for copied in (False, True):
            k, v = (x[:, :, :count].clone() if copied else x[:, :, :count] for x in (layer.fp_k, layer.fp_v))
            part = PackedLayer(k, v, layer.segments, order)
            expected = reference.attend(q, part, None, 0.2).double()
            assert relative_error(attend(q, part, None, 0.2), expected) <= tolerance


def test_moved_segments_are_read_where_they_are(tolerance: float) -> None:
    """Tables hold addresses: segments that differ only in where they lie must not share one."""
    shape = Shape(group=7, channels=64)
    q = queries(shape, 1)
    for seed in range(5):
        case = build(shape, (4, 2, 2), seed=seed)
        assert torch.equal(attend(q, case.layer, None, 0.2), attend(q, case.layer, None, 0.2))
        expected = reference.attend(q, case.layer, None, 0.2).double()
        assert relative_error(attend(q, case.layer, None, 0.2), expected) <= tolerance


def test_too_many_channels_are_refused() -> None:
    shape = Shape(channels=264)
    with pytest.raises(UserError, match="head_dim of 264; the CPU backend takes up to 256"):
        attend(queries(shape, 1), build(shape, (2,)).layer, None, 0.2)


def test_dtypes_that_are_not_stored_are_refused() -> None:
    shape = Shape()
    layer = build(shape, (2,)).layer
    attend(queries(shape, 1), layer, None, 0.2)
    wide = replace(layer, fp_k=layer.fp_k.double(), fp_v=layer.fp_v.double())
    with pytest.raises(UserError, match="torch.float64; the CPU backend takes"):
        attend(queries(shape, 1), wide, None, 0.2)
    with pytest.raises(UserError, match="torch.bfloat16 and of torch.float16"):
        attend(queries(shape, 1), replace(layer, fp_k=layer.fp_k.bfloat16(), fp_v=layer.fp_v.bfloat16()), None, 0.2)


def test_queries_that_do_not_fit_are_refused() -> None:
    shape = Shape(batch=2, heads=2, group=3)
    layer, q = build(shape, (2,)).layer, queries(shape, 1)
    for wrong in (q[:, :5], q[:1], q[..., :16]):
        with pytest.raises(UserError, match=r"do not fit a layer of 2 requests, 2 KV heads and head_dim 32; give \[2,"):
            attend(wrong, layer, None, 0.2)


def test_channels_apart_are_refused() -> None:
    shape = Shape()
    layer = build(shape, (2,)).layer
    turned = layer.fp_k.mT.contiguous().mT
    with pytest.raises(UserError, match="must lie next to each other"):
        attend(queries(shape, 1), replace(layer, fp_k=turned), None, 0.2)


def test_queries_that_are_a_part_of_something() -> None:
    shape = Shape(group=7, channels=64)
    case, q = build(shape, (4, 2)), queries(shape, 1)
    part = torch.cat([q, q], 3)[..., :64]
    assert not part.is_contiguous()
    assert torch.equal(attend(part, case.layer, None, 0.2), attend(q, case.layer, None, 0.2))


def test_nothing_stored_gives_nothing() -> None:
    shape = Shape(tail=0)
    q = queries(shape, 1)
    assert torch.equal(attend(q, build(shape, ()).layer, None, 0.2), torch.zeros_like(q))


def test_compiled_code_is_kept_apart_for_each_state_of_the_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    folder = compiled._folder.__wrapped__()
    assert folder is not None and Path(folder).is_dir() and Path(folder).parent == tmp_path


def test_where_nothing_can_be_written_code_is_compiled_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "file"))
    assert compiled._folder.__wrapped__() is None
    monkeypatch.setattr(compiled, "_folder", lambda: None)
    assert compiled.compiled(lambda x: x + 1)(2) == 3


def test_layer_without_segments(tolerance: float) -> None:
    shape = Shape()
    case = build(shape, ())
    bare = PackedLayer(case.layer.fp_k, case.layer.fp_v, (), case.layer.order)
    q = queries(shape, 1)
    assert relative_error(attend(q, bare, None, 0.2), plain_attention(q, case, causal(1, 5), 0.2)) <= tolerance


def test_nan_is_not_hidden() -> None:
    """In K, V or queries: the heads that read it answer NaN, and the others do not."""
    shape = Shape(group=7, channels=64, window=32, tail=40)
    q = queries(shape, 1)
    for where in ("fp_k", "fp_v", "q"):
        case, asked = build(shape, (4, 2)), q.clone()
        (asked[:, :7] if where == "q" else getattr(case.layer, where)[:, 0])[..., -1, 3] = torch.nan
        got = attend(asked, case.layer, None, 0.2)
        assert got[:, :7].isnan().any(dim=(1, 2, 3)).all() and not got[:, 7:].isnan().any(), where


def _nothing(address: object) -> None:
    """To be compiled."""


def test_damaged_code_is_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_folder", lambda: str(tmp_path))
    compiled.compiled_for_c(_nothing)
    kept = list(tmp_path.rglob("*.nb*"))
    assert len(kept) == 2
    for share in (0.0, 0.5):
        for path in kept:
            path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
        assert compiled.compiled_for_c(_nothing).address
        assert all(path.stat().st_size for path in tmp_path.rglob("*.nb*"))
