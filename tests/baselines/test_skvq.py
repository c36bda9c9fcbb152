"""SKVQ against its official numbers and schedule, and its calibration."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from baselines.skvq import clusters, output_error, searched
from tests.architectures import build
from tests.architectures import video_inputs as inputs_for
from tests.cache.stream_oracle import attention
from tests.cache.test_nbytes import storage_bytes
from tests.vlm import batch_inputs, tiny_model, video_ids, video_inputs, words
from windowquant.cache.streaming.clusters import ClusterCodec
from windowquant.cache.streaming.rotation import Rotation
from windowquant.cache.streaming.rules import Sliding
from windowquant.cache.streaming.track import Scheme, Track
from windowquant.calibrate.statistics import Statistics, measure_statistics
from windowquant.core.plan import KVShape
from windowquant.errors import UserError
from windowquant.kernels.piecewise import attend
from windowquant.method import get_method
from windowquant.models.prompt import Prompt
from windowquant.protocols import answer


@pytest.fixture(scope="module")
def statistics(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Statistics of `tiny_model()`."""
    path = tmp_path_factory.mktemp("skvq") / "statistics.safetensors"
    measure_statistics(tiny_model(), [video_inputs(seed=seed) for seed in range(3)]).save(path)
    return path


def skvq(path: Path, **params):
    return get_method("skvq", **{"statistics": str(path), "group": 4, "window": 8, "sinks": 3, **params})


def one_cluster(clip: float, levels: int, fp8: bool, channels: int = 4) -> ClusterCodec:
    return ClusterCodec(torch.zeros(channels, dtype=torch.int64), torch.tensor([clip]), levels, fp8)


@pytest.mark.parametrize(
    ("values", "clip", "levels", "fp8", "codes", "scale", "want"),
    [
        ([-1, 0, 0.5, 2], 1.0, 4, False, [0, 1, 2, 3], 1, [-1, 0, 1, 2]),
        ([-1, 0, 0.5, 2], 0.92, 4, False, [0, 1, 2, 3], 0.919922, [-0.919922, 0, 0.919922, 1.839844]),
        ([-1, 0, 0.5, 2], 0.92, 4, True, [0, 1, 2, 3], 0.9375, [-0.9375, 0, 0.9375, 1.875]),
        ([-1, 0, 0.5, 2], 0.92, 3, True, [0, 1, 1, 2], 1.375, [-0.9375, 0.4375, 0.4375, 1.8125]),
        ([1, 1.5, 3, 4], 0.92, 4, False, [0, 1, 2, 3], 0.919922, [0.919922, 1.839844, 2.759766, 3.679688]),
        ([0.7] * 4, 1.0, 4, False, [0, 0, 0, 0], 1e-5, [0.7] * 4),
    ],
)
def test_numbers_of_the_official_code(values, clip, levels, fp8, codes, scale, want) -> None:
    codec = one_cluster(clip, levels, fp8)
    parts = codec.encode(torch.tensor(values, dtype=torch.float16).view(1, 1, 1, 4), "x")
    assert float(parts[1].float()) == pytest.approx(scale, abs=5e-7)
    got = codec.decode(parts, 1).flatten()
    assert got.half().tolist() == pytest.approx(want, abs=6e-4 if values[0] == 0.7 else 1e-6)
    assert torch.round((got - parts[2].float()) / parts[1].float()).flatten().tolist() == codes


@pytest.mark.parametrize(
    ("value", "stored"),
    [(0.0009, 0.0), (0.00098, 0.001953), (0.0195, 0.019531), (0.333, 0.34375), (1.0417, 1.0), (1e4, 448)],
)
def test_fp8_minimum(value: float, stored: float) -> None:
    parts = one_cluster(1.0, 4, fp8=True).encode(torch.full((1, 1, 1, 4), value), "x")
    assert float(parts[2].float()) == pytest.approx(stored, abs=1e-6)


def test_fp8_changes_what_is_read_but_no_code() -> None:
    x = torch.randn(2, 2, 9, 4, generator=torch.Generator().manual_seed(0)).half()
    members = torch.tensor([0, 1, 1, 2, 0, 0, 2, 1])
    a, b = (ClusterCodec(members, torch.tensor([0.9, 1.0, 0.7]), 4, fp8) for fp8 in (True, False))
    assert torch.equal(a.encode(x, "x")[0], b.encode(x, "x")[0])
    assert not torch.equal(a.decode(a.encode(x, "x"), 2), b.decode(b.encode(x, "x"), 2))


@pytest.mark.parametrize("levels", [3, 4, 16, 256])
def test_clusters_of_unequal_size_across_heads(levels: int) -> None:
    """Against a loop over tokens and clusters in float64."""
    x = torch.randn(2, 2, 5, 4, generator=torch.Generator().manual_seed(1))
    members, clips = torch.tensor([0, 1, 1, 2, 0, 0, 1, 1]), torch.tensor([0.9, 1.0, 0.7])
    codec = ClusterCodec(members, clips, levels, fp8=False)
    parts = codec.encode(x, "x")
    got, want = codec.decode(parts, 2), x.double().clone()
    flat = want.transpose(1, 2).reshape(2, 5, 8)
    for row in range(2):
        for token in range(5):
            for cluster in range(3):
                own = members == cluster
                values = flat[row, token, own].clone()
                low, high = float(values.min() * clips[cluster]), float(values.max() * clips[cluster])
                step = max((high - low) / (levels - 1), 1e-5)
                flat[row, token, own] = low + step * ((values - low) / step).clamp(0, levels - 1).round()
    torch.testing.assert_close(got.double(), flat.view(2, 5, 2, 4).transpose(1, 2), atol=1e-5, rtol=1e-5)
    held = sum(part.numel() * part.element_size() for part in parts[:1])
    metadata = sum(part.numel() * 2 for part in parts[1:])  # in a 16-bit kv dtype
    assert held + metadata == 2 * 5 * codec.token_bits(2, 4) / 8


def test_an_element_moves_its_own_cluster_of_its_own_token_only() -> None:
    members = torch.tensor([0, 1, 1, 2, 0, 0, 1, 1])
    codec = ClusterCodec(members, torch.ones(3), 4, fp8=True)
    x = torch.randn(2, 2, 5, 4, generator=torch.Generator().manual_seed(2))
    moved = x.clone()
    moved[1, 0, 3, 1] += 9
    a, b = (codec.decode(codec.encode(y, "x"), 2) for y in (x, moved))
    changed = (a != b).nonzero().tolist()
    assert changed and all(index in [[1, 0, 3, 1], [1, 0, 3, 2], [1, 1, 3, 2], [1, 1, 3, 3]] for index in changed)


def test_clusters_are_of_channels_alike_and_cover_all_of_them() -> None:
    low = torch.tensor([-1.0, -9.0, -1.1, -8.8, 0.0, -0.9])
    high = torch.tensor([1.0, 2.0, 1.1, 2.2, 30.0, 1.0])
    members = clusters(low, high, 3)
    assert members[0] == members[2] == members[5] and members[1] == members[3]
    assert sorted(members.unique().tolist()) == [0, 1, 2]
    assert torch.equal(members, clusters(low, high, 3)), "seeded"
    assert clusters(torch.zeros(6), torch.ones(6), 4).tolist() == [0] * 6


@pytest.mark.parametrize("name", ["unrotated_key", "value"])
@pytest.mark.parametrize("pre_rope", [True, False])
@pytest.mark.parametrize("levels", [3, 4])
def test_searched_clips_leave_the_attention_no_worse_than_any_constant(
    statistics: Path, name: str, pre_rope: bool, levels: int
) -> None:
    """Than no clip (1.0), the official 0.92 and the like; measured on the drawn tokens."""
    drawn, members = Statistics.load(statistics).drawn(1), torch.arange(16) % 3
    is_key = name != "value"

    def error(clips: Tensor) -> float:
        return output_error(ClusterCodec(members, clips, levels, True), drawn, is_key, pre_rope)

    codec = searched(ClusterCodec(members, torch.ones(3), levels, True), drawn, is_key, pre_rope)
    assert error(codec.clips) <= min(error(torch.full((3,), clip)) for clip in (0.5, 0.8, 0.92, 0.96, 1.0))
    assert error(codec.clips) < error(torch.ones(3)) and codec.levels == levels and codec.fp8


def test_error_of_the_output_is_that_of_what_would_be_read(statistics: Path) -> None:
    """Keys coded before RoPE, rotated as the model did it; against attention of one query at a time in float64."""
    drawn = Statistics.load(statistics).drawn(0)
    codec = ClusterCodec(torch.arange(16) % 2, torch.tensor([0.9, 0.8]), 4, False)
    plain = drawn.unrotated_key.transpose(0, 1)[None]
    read = codec.decode(codec.encode(plain, "x"), 2)[0].transpose(0, 1)
    total, count = 0.0, 0
    for token in range(len(drawn.query)):
        seen = [other for other in range(token + 1) if drawn.sample[other] == drawn.sample[token]]
        for head in range(6):
            outputs = []
            for keys in (drawn.key, drawn.rotated(read)):
                k, v = keys[seen, head // 3].double(), drawn.value[seen, head // 3].double()
                outputs.append((k @ drawn.query[token, head].double() / 8**0.5).softmax(0) @ v)
            total, count = total + float((outputs[0] - outputs[1]).square().sum()), count + 8
    assert output_error(codec, drawn, True, True) == pytest.approx(total / count, rel=1e-3)


def test_a_method_with_searched_clips_uses_them(statistics: Path) -> None:
    model, found = tiny_model(), Statistics.load(statistics)
    constant, best = (skvq(statistics, clips=clips, clip=1.0) for clips in ("constant", "searched"))
    assert (constant.status, best.status) == ("official", "variant")
    errors = []
    for method in (constant, best):
        codecs = [method.schemes(model, KVShape(2, 8))(0)[which].codec for which in (0, 1)]
        errors.append([output_error(c, found.drawn(0), c is codecs[0], True) for c in codecs])
    assert errors[1][0] < errors[0][0] and errors[1][1] < errors[0][1]


def rotary(positions: Tensor) -> tuple[Tensor, Tensor]:
    """Plain RoPE of 8 channels."""
    angles = positions[..., None].float() / 100 ** (torch.arange(4) / 4)
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


def test_rotation_is_undone_and_redone() -> None:
    ids = torch.zeros(1, 6, dtype=torch.int64)
    rotation = Rotation(rotary, Prompt(ids, ids == 0, ids == 1), (0,), 0)
    x = torch.randn(1, 2, 10, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(rotation.redo(rotation.undo(x, 3), 3), x, atol=1e-6, rtol=1e-6)
    cos, sin = rotary(torch.arange(3, 13))
    pairs = torch.view_as_complex(torch.stack([x[..., :4], x[..., 4:]], -1).double())
    turned = pairs * torch.complex(cos[:, :4].double(), sin[:, :4].double())
    want = torch.cat([turned.real, turned.imag], -1).float()
    torch.testing.assert_close(rotation.redo(x, 3), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("cut", [[1] * 12, [12], [5, 6, 1]], ids=["single", "whole", "mixed"])
@pytest.mark.parametrize("prefill", [2, 12])
def test_schedule_and_attention_against_tokens_one_at_a_time(prefill: int, cut: list[int]) -> None:
    """Window 6, 3 sinks: a token is coded before the attention of the step that pushes it out."""
    k, v, q = (torch.randn(1, h, 32, 8, generator=torch.Generator().manual_seed(h)) for h in (2, 2, 6))
    v = v + 1
    members = torch.arange(16) % 4
    codec = ClusterCodec(members, torch.full((4,), 0.92), 4, fp8=True)
    ids = torch.zeros(1, 32, dtype=torch.int64)
    rotation = Rotation(rotary, Prompt(ids, ids == 0, ids == 1), (0,), 0)
    scheme = Scheme(codec, Sliding(6, 3, before=True))
    tracks = Track(scheme, k[:, :, :prefill], "K", 0, rotation), Track(scheme, v[:, :, :prefill], "V", 0)
    coded = [
        rotation.redo(codec.decode(codec.encode(rotation.undo(k, 0), "K"), 2), 0),
        codec.decode(codec.encode(v, "V"), 2),
    ]
    done = prefill
    for size in cut:
        here = slice(done, done + size)
        got = attend(q[:, :, here], *(t.append(x[:, :, here]) for t, x in zip(tracks, (k, v), strict=True)), None, 0.4)
        for i in range(size):
            n = done + i + 1
            read = []
            for exact, code in zip((k, v), coded, strict=True):
                x = exact[:, :, :n].double().clone()
                if n > 9:
                    x[:, :, 3 : n - 6] = code[:, :, 3 : n - 6].double()
                read.append(x)
            torch.testing.assert_close(got[:, :, i], attention(q[:, :, n - 1], *read, 0.4), atol=1e-4, rtol=1e-4)
        done += size
        assert tracks[0].length - tracks[0].coded_end == min(6, max(0, done - 3))


@pytest.mark.parametrize("protocol", ["context", "cached", "paper"])
def test_scores_are_those_of_decoding(statistics: Path, protocol) -> None:
    model, inputs, given = tiny_model(), video_inputs(), words(12, seed=3)
    with skvq(statistics).bind(model) as bound:
        reply, session = answer(bound, inputs, protocol, 10)
        assert session.logits(reply.tokens).argmax(-1).tolist() == reply.tokens
        forced = session.logits(given)
        _, fresh = answer(bound, inputs, protocol, 1)
        steps = [fresh.first_logits, *(fresh._forward(input_ids=torch.tensor([[t]]))[-1] for t in given[:-1])]
        torch.testing.assert_close(forced, torch.stack(steps), atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize(
    ("params", "bits"),
    [({}, 2 + 16 / 4), ({"fp8": False}, 2 + 32 / 4), ({"v_bits": 1.5}, (2 + 16 / 4 + 8 * 4 / 16 + 16 / 4) / 2)],
)
def test_bytes_are_those_held_and_those_of_the_formula(statistics: Path, params: dict, bits: float) -> None:
    model, inputs = tiny_model(), video_inputs()
    with skvq(statistics, **params).bind(model) as bound:
        assert [len(s.codec.sizes) for s in bound._schemes(0)] == [4, 4]
        for new in (1, 20):
            reply, session = answer(bound, inputs, "context", new)
            held = session.cache.nbytes()
            assert held.total == storage_bytes(session.cache) == reply.kv.total
            assert held.total - held.slack == session.cache.predicted_nbytes()
        assert reply.average_bits == pytest.approx(bits, rel=0.01), "every visual token is coded by now"


@pytest.mark.parametrize("pre_rope", [True, False])
def test_a_row_does_not_depend_on_its_batch(statistics: Path, pre_rope: bool) -> None:
    model = tiny_model()
    rows = [video_ids(4, 3, 7) + video_ids(4, 0, 2), video_ids(4, 5, 3, seed=2), words(9)]
    inputs, new = batch_inputs(rows, 4), 10
    pixels, videos = inputs["pixel_values_videos"], [2, 1, 0]
    options = {"max_new_tokens": new, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    with skvq(statistics, k_bits=4, v_bits=4, pre_rope=pre_rope).bind(model) as bound:
        together = model.generate(**inputs, **{bound.cache_keyword: bound.new_cache(inputs)}, **options)
        for row, count in enumerate(videos):
            alone = {"input_ids": torch.tensor([rows[row]])}
            alone["attention_mask"] = torch.ones_like(alone["input_ids"])
            if count:
                alone["pixel_values_videos"] = pixels[sum(videos[:row]) : sum(videos[: row + 1])]
            single = model.generate(**alone, **{bound.cache_keyword: bound.new_cache(alone)}, **options)
            for a, b in zip(together.logits, single.logits, strict=True):
                torch.testing.assert_close(a[row], b[0], atol=2e-3, rtol=2e-3)
        beams = {"max_new_tokens": 8, "do_sample": False, "num_beams": 3}
        cache = bound.new_cache(inputs)
        model.generate(**inputs, **{bound.cache_keyword: cache}, **beams)
        assert cache.nbytes().total == storage_bytes(cache)


@pytest.mark.parametrize(
    ("name", "pre_rope"), [("llava_onevision", True), ("qwen2_vl", True), ("qwen2_vl", False), ("qwen3_vl", True)]
)
def test_positions_of_other_architectures_are_kept(name: str, pre_rope: bool, tmp_path: Path) -> None:
    """At 8 bits, with M-RoPE too, the answer's distribution is the exact cache's; and keys are as calibrated."""
    model, processor = build(name)
    inputs, path = inputs_for(name, processor), tmp_path / "statistics.safetensors"
    found = measure_statistics(model, [inputs])
    found.save(path)
    method = skvq(path, k_bits=8.0, v_bits=8.0, clip=1.0, fp8=False, kv_dtype="model", pre_rope=pre_rope)
    with method.bind(model) as bound:
        reply, session = answer(bound, inputs, "paper", 12)
        near = session.logits(reply.tokens).log_softmax(-1)
        (group,) = session.cache.layers[1].groups
        if pre_rope:
            inside = group.k._coded.read(0, session.prompt.length - 3 - 8)[0].amax(1)
            assert (inside <= found.tensors["unrotated_key.high"][1] + 0.1).all()
    with get_method("dynamic").bind(model) as bound:
        exact = answer(bound, inputs, "paper", 1)[1].logits(reply.tokens).log_softmax(-1)
    assert float((exact.exp() * (exact - near)).sum(-1).mean()) < 0.01


def test_without_calibration_it_refuses(statistics: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no statistics file .*calibrate.py"):
        skvq(tmp_path / "none.safetensors").bind(tiny_model())
    with pytest.raises(UserError, match="stale"):
        skvq(statistics).bind(tiny_model(seed=1))
    found = Statistics.load(statistics)
    bare = Statistics(found.origin, {k: x for k, x in found.tensors.items() if not k.endswith("drawn")})
    bare.save(tmp_path / "bare.safetensors")
    skvq(tmp_path / "bare.safetensors").bind(tiny_model())
    with pytest.raises(UserError, match="no drawn queries"):
        skvq(tmp_path / "bare.safetensors", clips="searched").bind(tiny_model())


def test_a_rotation_that_depends_on_the_length_is_refused(statistics: Path) -> None:
    model = tiny_model()
    model.model.language_model.rotary_emb.rope_type = "dynamic"
    with pytest.raises(UserError, match="pre_rope to false"):
        skvq(statistics).bind(model)
    skvq(statistics, pre_rope=False).bind(model)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"k_bits": 3}, "k_bits is 3; use one of 1.5, 2, 4, 8"),
        ({"clip": 0.0}, "clip is 0.0"),
        ({"clips": "best"}, "use one of constant, searched"),
        ({"group": 0}, "group is 0"),
        ({"window": 0}, "window is 0"),
        ({"sinks": -1}, "sinks is -1"),
        ({"fp8": 1}, "true or false"),
        ({"window_size": 8}, "no hyper-parameter 'window_size'"),
    ],
)
def test_options_out_of_range_are_refused(params: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        get_method("skvq", **params)
