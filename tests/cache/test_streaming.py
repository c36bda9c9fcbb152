"""The streaming cache: its buffer, its rules, what it holds and what its attention reads."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.cache.stream_oracle import Exact, attention
from windowquant.cache.streaming.buffer import TokenBuffer
from windowquant.cache.streaming.codecs import GroupCodec
from windowquant.cache.streaming.rules import Blocks, Rule, Sliding
from windowquant.cache.streaming.track import Scheme, Track
from windowquant.errors import UserError
from windowquant.kernels import piecewise
from windowquant.kernels.piecewise import attend

RULES: dict[str, Rule] = {
    "blocks": Blocks(8),
    "after": Sliding(5),
    "before": Sliding(5, sinks=3, before=True),
    "window 1": Sliding(1, sinks=2),
}


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(["append", "drop"]), st.integers(0, 30)), max_size=30))
def test_a_buffer_is_a_queue(steps: list[tuple[str, int]]) -> None:
    buffer, want, made = TokenBuffer(torch.zeros(2, 1, 0, 3)), torch.zeros(2, 1, 0, 3), 0.0
    for kind, n in steps:
        if kind == "append":
            x = torch.arange(made, made + 6 * n).view(2, 1, n, 3)
            made += 6 * n
            buffer.append(x)
            want = torch.cat([want, x], 2)
        else:
            before, n = buffer.view(), min(n, want.shape[2])
            kept = before.clone()
            buffer.drop(n)
            assert torch.equal(before, kept), "what was read stays until the next append"
            want = want[:, :, n:]
        assert torch.equal(buffer.view(), want) and buffer.length == want.shape[2]
        held = buffer._data.untyped_storage().nbytes()
        assert buffer.length * buffer.entry_bytes + buffer.slack_bytes == held
    buffer.select(torch.tensor([1, 1, 0]))
    assert torch.equal(buffer.view(), want[[1, 1, 0]])


def test_a_growing_buffer_copies_each_entry_a_few_times_only() -> None:
    buffer, moves = TokenBuffer(torch.zeros(1, 1, 0, 1)), 0
    for _ in range(2000):
        before = buffer._data.data_ptr()
        buffer.append(torch.zeros(1, 1, 1, 1))
        moves += buffer.length if buffer._data.data_ptr() != before else 0
    assert moves < 2000 * 12
    for _ in range(500):  # a window that slides
        buffer.append(torch.zeros(1, 1, 1, 1))
        buffer.drop(1)
    buffer.drop(1990)
    assert buffer.length == 10 and buffer.slack_bytes <= 4 * 10, "memory is given back"


@pytest.mark.parametrize("name", RULES)
def test_a_rule_never_takes_a_code_back(name: str) -> None:
    rule = RULES[name]
    ends = [rule.coded(n) for n in range(60)]
    assert ends == sorted(ends) and all(end <= n for n, end in enumerate(ends))
    reads = [rule.read_coded(position) for position in range(60)]
    assert all(ends[p] <= read <= ends[p + 1] for p, read in enumerate(reads[:-1]))


@pytest.mark.parametrize("build", [lambda: Blocks(0), lambda: Sliding(0), lambda: Sliding(4, sinks=-1)])
def test_sizes_out_of_range_are_refused(build) -> None:
    with pytest.raises(UserError, match="set it to"):
        build()


def schemes(k_rule: Rule, v_rule: Rule, bits: int = 4) -> tuple[Scheme, Scheme]:
    return Scheme(GroupCodec(bits, 4, "channel"), k_rule), Scheme(GroupCodec(bits, 4, "token"), v_rule)


CODED = [("blocks", "after"), ("blocks", "before"), ("blocks", "window 1")]


@pytest.mark.parametrize(("k_rule", "v_rule"), CODED)
@pytest.mark.parametrize("prefill", [0, 4, 13])
@pytest.mark.parametrize("cut", [[1] * 20, [20], [7, 1, 11, 1]], ids=["single", "whole", "mixed"])
def test_updates_of_any_size_are_as_tokens_one_at_a_time(k_rule: str, v_rule: str, prefill: int, cut) -> None:
    heads, group, d = 2, 7, 8
    rules = RULES[k_rule], RULES[v_rule]
    k, v, q = (noise(1, h, 33, d, seed=i) for i, h in enumerate((heads, heads, heads * group)))
    tracks = [Track(s, x[:, :, :prefill], "x", 0) for s, x in zip(schemes(*rules), (k, v), strict=True)]
    oracle = Exact(k, v, *rules, group=4, bits=4)
    done = prefill
    for size in cut:
        here = slice(done, done + size)
        keys, values = (track.append(x[:, :, here]) for track, x in zip(tracks, (k, v), strict=True))
        got = attend(q[:, :, here], keys, values, None, 0.3)
        for i in range(size):
            want = attention(q[:, :, done + i], *oracle.read_by(done + i), 0.3)
            torch.testing.assert_close(got[:, :, i], want, atol=1e-5, rtol=1e-5)
        done += size
        assert [track.coded_end for track in tracks] == [rule.coded(done) for rule in rules]
    assert done == prefill + 20


@pytest.mark.parametrize("rows", [3, 100])
def test_pieces_do_not_change_the_result(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    k, v, q = noise(1, 2, 60, 8), noise(1, 2, 60, 8, seed=1), noise(1, 6, 20, 8, seed=2)
    results = []
    for chunk in (2**24, 2 * 8 * rows):
        monkeypatch.setattr(piecewise, "_CHUNK", chunk)
        tracks = [Track(s, x[:, :, :40], "x", 0) for s, x in zip(schemes(Blocks(8), Sliding(5)), (k, v), strict=True)]
        keys, values = (track.append(x[:, :, 40:]) for track, x in zip(tracks, (k, v), strict=True))
        results.append(attend(q, keys, values, None, 0.3))
    torch.testing.assert_close(*results, atol=1e-6, rtol=1e-6)


def test_masks_hide_columns_and_a_query_that_sees_nothing_is_finite() -> None:
    k, v, q = noise(2, 1, 30, 8), noise(2, 1, 30, 8, seed=1), noise(2, 2, 3, 8, seed=2)
    keys, values = (
        Track(s, x[:, :, :27], "x", 0).append(x[:, :, 27:])
        for s, x in zip(schemes(Blocks(8), Sliding(5), bits=8), (k, v), strict=True)
    )
    mask = torch.ones(2, 1, 3, 30, dtype=torch.bool).tril(27)
    mask[1, :, :, :10] = False
    additive = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    run = partial(attend, q, keys, values, scaling=1.0)
    torch.testing.assert_close(run(mask=mask), run(mask=additive))
    torch.testing.assert_close(run(mask=mask)[0], run(mask=None)[0])
    alone = run(mask=mask[1:].expand(2, -1, -1, -1))
    torch.testing.assert_close(run(mask=mask)[1], alone[1])
    assert run(mask=torch.zeros_like(mask)).isfinite().all()


@pytest.mark.parametrize("name", RULES)
def test_codes_are_only_ever_appended(name: str) -> None:
    codec = GroupCodec(2, 4, "channel" if name == "blocks" else "token")
    x = noise(1, 2, 60, 8)
    track, before = Track(Scheme(codec, RULES[name]), x[:, :, :20], "x", 0), []
    for step in range(20, 60):
        track.append(x[:, :, step : step + 1])
        parts = [part.view().clone() for part in track._coded._parts]
        for old, new in zip(before, parts, strict=False):
            assert torch.equal(new[:, :, : old.shape[2]], old)
        before = parts
    whole = Track(Scheme(codec, RULES[name]), x, "x", 0)
    assert all(torch.equal(a, b.view()) for a, b in zip(before, whole._coded._parts, strict=True))


def held_by(track: Track) -> int:
    """Bytes of the storages behind a track."""
    tensors = [track._first, track._recent._data, track._kept._data, *(part._data for part in track._coded._parts)]
    return sum(x.untyped_storage().nbytes() for x in tensors)


def same_tokens(a: Track, b: Track) -> bool:
    """Whether two tracks hold the same codes and the same exact tokens."""
    pairs = [(a._first, b._first), (a._recent.view(), b._recent.view())]
    codes = zip(a._coded.parts(), b._coded.parts(), strict=True) if b.coded else ()
    counts = (a.length, a.coded) == (b.length, b.coded)
    return counts and all(torch.equal(x, y) for x, y in [*pairs, *codes])


CUTS = st.lists(st.integers(1, 13), max_size=5)


@settings(deadline=None, max_examples=80)
@given(st.sampled_from(sorted(RULES)), st.integers(0, 20), CUTS, CUTS, st.booleans())
def test_a_marked_moment_comes_back_exactly(name: str, prefill: int, before, after, saved: bool) -> None:
    """Whatever was coded in between, and in rows that were repeated in between; also through its state."""
    scheme = Scheme(GroupCodec(4, 4, "channel" if name == "blocks" else "token"), RULES[name])
    x = noise(2, 2, 160, 8).half()
    track, twin = (Track(scheme, x[:, :, :prefill], "x", 0) for _ in range(2))
    done = prefill
    for size in before:
        for each in (track, twin):
            each.append(x[:, :, done : done + size])
        done += size
    track.mark()
    window = track._recent.length
    for size in after:
        track.append(x[:, :, 70 : 70 + size])  # other tokens than those that follow in the end
        assert track._kept.length <= window
        parts = track.held()
        assert parts.codes + parts.metadata + parts.exact + parts.slack == held_by(track)
        rows = track.length - track.coded
        assert parts.exact == (rows + len(track.kept_positions())) * track.token_bytes
        assert track.predicted() == parts.codes + parts.metadata + parts.exact
    if saved:
        state, track = track.state(), Track(scheme, x[:, :, :0], "x", 0)
        track.restore(state)
    track.select(torch.tensor([0, 0, 1]))
    track.select(torch.tensor([0, 2]))
    for _ in range(2):
        track.go_back()
        assert same_tokens(track, twin) and not track.kept_positions()
    keys = [each.append(x[:, :, done : done + 30]) for each in (track, twin)]
    assert torch.equal(keys[0].last, keys[1].last) and torch.equal(keys[0].boundaries, keys[1].boundaries)
    assert same_tokens(track, twin)
    end = int(keys[0].boundaries[-1])
    if end > keys[0].sinks:
        assert torch.equal(*(each.read(each.sinks, end) for each in keys))


@pytest.mark.parametrize("axis", ["channel", "token"])
def test_a_group_knows_nothing_of_its_neighbours(axis) -> None:
    codec, x = GroupCodec(2, 4, axis), noise(2, 2, 8, 8)
    moved = x.clone()
    moved[1, 0, 5, 2] += 3
    a, b = (codec.decode(codec.encode(y, "x"), 2) for y in (x, moved))
    changed = (a != b).nonzero().tolist()
    own = [[1, 0, t, 2] for t in (4, 5, 6, 7)] if axis == "channel" else [[1, 0, 5, c] for c in (0, 1, 2, 3)]
    assert changed and all(index in own for index in changed)


@pytest.mark.parametrize("axis", ["channel", "token"])
def test_error_is_half_a_step_at_most_and_falls_with_more_bits(axis) -> None:
    x, errors = noise(2, 2, 16, 8).half(), []
    for bits in (1, 2, 4, 8):
        codec = GroupCodec(bits, 8, axis)
        parts = codec.encode(x, "x")
        error = (codec.decode(parts, 2) - x.float()).abs()
        assert error.max() <= parts[1].max() * 0.51
        errors.append(float(error.mean()))
        assert sum(p.numel() * p.element_size() for p in parts) == 2 * 16 * codec.token_bits(2, 8) / 8
    assert errors == sorted(errors, reverse=True)


@pytest.mark.parametrize("axis", ["channel", "token"])
@pytest.mark.parametrize("value", [0.0, 0.7, -1000.0])
def test_a_constant_group_is_exact(axis, value: float) -> None:
    codec, x = GroupCodec(2, 4, axis), torch.full((1, 1, 4, 4), value, dtype=torch.float16)
    assert torch.equal(codec.decode(codec.encode(x, "x"), 1).half(), x)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_values_that_are_no_numbers_are_refused_by_name(bad: float) -> None:
    x = noise(1, 1, 8, 8)
    x[0, 0, 3, 1] = bad
    with pytest.raises(UserError, match="layer 3 K"):
        Track(Scheme(GroupCodec(2, 4, "channel"), Blocks(8)), x, "layer 3 K", 0)
