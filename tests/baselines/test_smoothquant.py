"""SmoothQuant: its factors, that smoothing alone changes nothing, what is stored, and that nothing stays behind."""

import copy

import pytest
import torch

from baselines.smoothquant import LayerFactors, smoothing_factors
from tests.vlm import tiny_model, video_inputs
from windowquant.calibrate.statistics import Statistics, measure_statistics
from windowquant.core.quantizer import dequantize, quantize
from windowquant.errors import UserError
from windowquant.method import get_method
from windowquant.protocols import answer

SHAPES = [(6, 2, 8), (7, 1, 8), (4, 4, 16)]
SAMPLES = [video_inputs(frames=4, seed=5), video_inputs(frames=8, seed=9)]
INPUTS = video_inputs()


@pytest.fixture(params=SHAPES, ids=str, scope="module")
def calibrated(request, tmp_path_factory):
    """A model, which no test changes, and the path of its statistics."""
    model, path = tiny_model(*request.param), tmp_path_factory.mktemp("statistics") / "s.safetensors"
    measure_statistics(model, SAMPLES).save(path)
    return model, str(path)


def all_factors(model, path: str, migration: float = 0.5) -> list[LayerFactors]:
    found = Statistics.load(path)
    layers = model.model.language_model.layers
    return [LayerFactors.calibrated(found, i, layer.self_attn, migration) for i, layer in enumerate(layers)]


def folded_into_weights(model, factors: list[LayerFactors]):
    """A copy whose projections' own weights carry the factors."""
    model = copy.deepcopy(model)
    for layer, s in zip(model.model.language_model.layers, factors, strict=True):
        attention = layer.self_attn
        q = torch.stack([s.k[h * len(s.k) // (len(attention.q_proj.weight) // s.k.shape[1])] for h in heads(attention)])
        out = torch.stack([s.v[h * len(s.v) // len(heads(attention))] for h in heads(attention)])
        for projection, rows in ((attention.q_proj, q), (attention.k_proj, 1 / s.k), (attention.v_proj, 1 / s.v)):
            projection.weight.data *= rows.flatten()[:, None]
            projection.bias.data *= rows.flatten()
        attention.o_proj.weight.data *= out.flatten()[None]
    return model


def heads(attention) -> range:
    return range(len(attention.q_proj.weight) // attention.head_dim)


def test_factors_of_the_official_example() -> None:
    got = smoothing_factors(torch.tensor([16.0, 1.0, 4.0]), torch.tensor([1.0, 1.0, 0.25]), 0.5)
    assert got.tolist() == [4, 1, 4]
    floored = smoothing_factors(torch.tensor([0.0]), torch.tensor([0.0]), 0.5)
    assert floored.tolist() == pytest.approx([1.0])


def test_skvqs_smoothquant_example() -> None:
    """Its comparison: K over its channels' maxima (migration 1), INT2 with the minimum kept, and back."""
    k = torch.tensor([[8, -0.5, 0.25, 0.1], [-4, 1, -0.25, 0.2]])
    s = smoothing_factors(k.abs().amax(0), torch.ones(4), 1.0)
    assert s.tolist() == pytest.approx([8, 1, 0.25, 0.2])
    got = dequantize(quantize((k / s).view(1, 1, 1, 2, 4), 2, "token", "float")).view(2, 4) * s
    want = [[8, -0.5, 0.25, 0.1], [-2.666667, 1, -0.25, 0.2]]
    torch.testing.assert_close(got, torch.tensor(want), atol=1e-5, rtol=0)
    plain = dequantize(quantize(k.view(1, 1, 1, 2, 4), 2, "token", "float")).view(2, 4)
    want = [[8, -0.5, -0.5, -0.5], [-4, 1, -0.666667, 1]]
    torch.testing.assert_close(plain, torch.tensor(want), atol=1e-5, rtol=0)


@pytest.mark.parametrize("migration", [0.0, 0.5, 1.0])
def test_factors_are_the_formula_on_maxima_of_head_groups_and_rope_pairs(calibrated, migration: float) -> None:
    model, path = calibrated
    found = Statistics.load(path)
    half = found.peak("key").shape[-1] // 2
    for i, factors in enumerate(all_factors(model, path, migration)):
        q, k, v = (found.peak(name)[i] for name in ("query", "key", "value"))
        group, weight = len(q) // len(k), model.model.language_model.layers[i].self_attn.o_proj.weight.detach().abs()
        for h, j in ((0, 0), (len(k) - 1, half - 1), (0, half)):
            pair = [j % half, j % half + half]
            rows = range(h * group, (h + 1) * group)
            activation = max(float(k[h, c]) for c in pair)
            partner = max(float(q[r, c]) for r in rows for c in pair)
            assert float(factors.k[h, j]) == pytest.approx(activation**migration / partner ** (1 - migration))
            outputs = max(float(weight[:, r * 2 * half + j].max()) for r in rows)
            assert float(factors.v[h, j]) == pytest.approx(float(v[h, j]) ** migration / outputs ** (1 - migration))


def test_smoothing_alone_changes_nothing_and_equals_folding_into_weights(calibrated) -> None:
    model, path = calibrated
    want = model(**INPUTS).logits
    with get_method("smoothquant", statistics=path).bind(model):
        smoothed = model(**INPUTS).logits
    folded = folded_into_weights(model, all_factors(model, path))(**INPUTS).logits
    torch.testing.assert_close(smoothed, want, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(smoothed, folded, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("bits", [8, 4])
def test_stored_is_the_smoothed_k_and_v_per_token_over_all_heads(calibrated, bits: int) -> None:
    model, path = calibrated
    with get_method("dynamic").bind(folded_into_weights(model, all_factors(model, path))) as bound:
        exact = answer(bound, INPUTS, "paper", 1)[1].cache.layers
    method = get_method("smoothquant", bits_per_code=bits, statistics=path, kv_dtype="model")
    with method.bind(model) as bound:
        layers = answer(bound, INPUTS, "paper", 1)[1].cache.layers
    half = 2 ** (bits - 1) - 1
    for plain, layer in zip(exact, layers, strict=True):
        (segment,) = layer.stored.segments
        for block, x in ((segment.k, plain.keys[0, :, 3:35]), (segment.v, plain.values[0, :, 3:35])):
            scale = x.abs().amax((0, 2), keepdim=True) / half
            torch.testing.assert_close(block.scale.flatten(), scale.flatten(), rtol=1e-3, atol=1e-5)
            off = (dequantize(block)[0].flatten(1, 2) - scale * (x / scale).round()).abs()
            assert (off > 1e-3).float().mean() < 0.02 and bool((off <= scale * 1.01).all())


def test_static_scales_are_the_calibrated_peaks(calibrated) -> None:
    model, path = calibrated
    found = Statistics.load(path)
    with get_method("smoothquant_static", statistics=path, kv_dtype="model").bind(model) as bound:
        reply, session = answer(bound, INPUTS, "context", 4)
    for i, layer in enumerate(session.cache.layers):
        (segment,) = layer.stored.segments
        for block, name in ((segment.k, "key"), (segment.v, "value")):
            assert block.scale.numel() == 1
            assert float(block.scale) == pytest.approx(float(found.peak(name)[i].max()) / 127)
    with get_method("smoothquant_static", smoothing="folded", statistics=path).bind(model) as bound:
        for (k, v), factors, i in zip(bound.recipe().peaks, all_factors(model, path), range(2), strict=True):
            assert k == pytest.approx(float((found.peak("key")[i] / factors.k).max()))
            assert v == pytest.approx(float((found.peak("value")[i] / factors.v).max()))


def test_smoothing_helps_where_channels_differ(tmp_path) -> None:
    """Two key channels a hundred times as large as the others, INT4: smoothed keys give closer logits."""
    model = tiny_model()
    for layer in model.model.language_model.layers:
        layer.self_attn.k_proj.bias.data[[3, 12]] = 40.0
    measure_statistics(model, SAMPLES).save(tmp_path / "s.safetensors")
    with get_method("fp16", kv_dtype="model").bind(model) as bound:
        reply, session = answer(bound, INPUTS, "context", 6)
        exact = session.logits(reply.tokens).log_softmax(-1)
    errors = []
    for smoothing in ("folded", "none"):
        params = {"smoothing": smoothing, "statistics": str(tmp_path / "s.safetensors")}
        with get_method("smoothquant_int4", **params).bind(model) as bound:
            other = answer(bound, INPUTS, "context", 1)[1].logits(reply.tokens).log_softmax(-1)
        errors.append(float((exact.exp() * (exact - other)).sum(-1).mean()))
    assert errors[0] < errors[1]


def test_nothing_stays_behind(calibrated) -> None:
    model, path = calibrated
    want, state = model(**INPUTS).logits, {k: v.clone() for k, v in model.state_dict().items()}
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    with get_method("smoothquant", statistics=path).bind(model) as bound:
        answer(bound, INPUTS, "context", 2)
    assert [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()] == hooks
    assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())
    assert torch.equal(model(**INPUTS).logits, want)


@pytest.mark.parametrize(
    ("name", "params", "sentence"),
    [
        ("smoothquant", {"migration": 1.5}, "migration is 1.5"),
        ("smoothquant", {"scales": "static"}, "set zero_point to symmetric and granularity to tensor"),
        ("smoothquant", {"smoothing": "half"}, "smoothing is 'half'; use one of folded, none"),
        ("smoothquant", {"scales": "fixed"}, "scales is 'fixed'"),
        ("smoothquant", {"bits_per_code": 1}, "Symmetric codes of 1 bit"),
    ],
)
def test_bad_options_are_refused(name: str, params, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        get_method(name, **params)


def test_statistics_must_be_there_and_of_this_model(tmp_path) -> None:
    model = tiny_model()
    with pytest.raises(UserError, match="no statistics file"):
        get_method("smoothquant").bind(model)
    measure_statistics(tiny_model(seed=1), SAMPLES[:1]).save(tmp_path / "other.safetensors")
    with pytest.raises(UserError, match=r"other\.safetensors is stale"):
        get_method("smoothquant", statistics=str(tmp_path / "other.safetensors")).bind(model)
    get_method("smoothquant_token").bind(model)  # needs none
