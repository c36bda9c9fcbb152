"""Statistics: what is measured, what is in the file, and which files are refused."""

import json

import pytest
import torch
from safetensors.torch import save_file

from tests.vlm import batch_inputs, tiny_model, video_ids, video_inputs, words
from windowquant.calibrate.statistics import FILE_NAME, Drawn, Statistics, load_statistics, measure_statistics
from windowquant.errors import UserError

SAMPLES = [video_inputs(frames=4), video_inputs(frames=6, after=9, seed=3)]
SHAPE = {"heads": 6, "kv_heads": 2, "head_dim": 8}


def rotated(x: torch.Tensor, positions: torch.Tensor, theta: float = 1e6) -> torch.Tensor:
    """RoPE, channel pair by channel pair: x [T, H, D] float64."""
    half = x.shape[-1] // 2
    out = x.clone()
    for j in range(half):
        angle = positions * theta ** (-j / half)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        out[..., j] = x[..., j] * cos - x[..., j + half] * sin
        out[..., j + half] = x[..., j + half] * cos + x[..., j] * sin
    return out


def plain_states(model, inputs) -> list[dict[str, torch.Tensor]]:
    """Per layer, from the inputs of its projections: states [T, heads, D] float64 of one unpadded prompt."""
    layers = model.model.language_model.layers
    seen = []
    hooks = [layer.self_attn.k_proj.register_forward_pre_hook(lambda m, a: seen.append(a[0][0])) for layer in layers]
    with torch.no_grad():
        model(**inputs)
    for hook in hooks:
        hook.remove()
    theta = model.config.text_config.rope_parameters["rope_theta"]
    states = []
    for layer, x in zip(layers, seen, strict=True):
        attention, positions = layer.self_attn, torch.arange(len(x)).double()
        q, k, v = (
            (x.double() @ p.weight.double().T + p.bias.double()).unflatten(1, (-1, SHAPE["head_dim"])).detach()
            for p in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        states.append(
            {
                "query": rotated(q, positions, theta),
                "key": rotated(k, positions, theta),
                "value": v,
                "unrotated_key": k,
            }
        )
    return states


def test_ranges_are_those_of_all_tokens_of_all_samples() -> None:
    model = tiny_model(**SHAPE)
    found = measure_statistics(model, SAMPLES)
    each = [plain_states(model, sample) for sample in SAMPLES]
    for name in ("query", "key", "value", "unrotated_key"):
        for layer in range(2):
            x = torch.cat([states[layer][name] for states in each])
            torch.testing.assert_close(found.tensors[f"{name}.low"][layer], x.amin(0).float(), rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(found.tensors[f"{name}.high"][layer], x.amax(0).float(), rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(found.peak(name)[layer], x.abs().amax(0).float(), rtol=1e-4, atol=1e-4)


def test_drawn_tokens_are_evenly_spread_over_each_sample() -> None:
    model = tiny_model(**SHAPE)
    found = measure_statistics(model, SAMPLES, [Drawn(per_prompt=5)])
    each = [plain_states(model, sample) for sample in SAMPLES]
    for layer in range(2):
        drawn = found.drawn(layer)
        assert drawn.sample.tolist() == [0] * 5 + [1] * 5
        for name in ("query", "key", "value", "unrotated_key"):
            want = [x[torch.linspace(0, len(x) - 1, 5).round().long()] for x in (s[layer][name] for s in each)]
            torch.testing.assert_close(getattr(drawn, name), torch.cat(want).half(), rtol=2e-3, atol=2e-3)
    short = measure_statistics(model, SAMPLES[:1], [Drawn(per_prompt=1000)])
    assert len(short.drawn(0).query) == SAMPLES[0]["input_ids"].shape[1], "all of them"


def test_padding_does_not_count() -> None:
    model = tiny_model(**SHAPE)
    rows = [video_ids(4, 3, 12), words(4)]
    padded = measure_statistics(model, [batch_inputs(rows, 4)])
    ids = torch.tensor(rows[1:])
    text = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    alone = measure_statistics(model, [batch_inputs(rows[:1], 4), text])
    for name in ("value.low", "value.high", "unrotated_key.high"):  # padding shifts what RoPE rotates by
        torch.testing.assert_close(padded.tensors[name], alone.tensors[name], rtol=1e-4, atol=1e-4)


def test_the_model_is_left_as_it_was() -> None:
    model = tiny_model()
    want = model(**SAMPLES[0]).logits
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    measure_statistics(model, SAMPLES)
    assert [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()] == hooks
    assert model.config.text_config._attn_implementation == "sdpa"
    assert torch.equal(model(**SAMPLES[0]).logits, want)


def test_round_trip_beside_the_checkpoint(tmp_path) -> None:
    model = tiny_model()
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    with pytest.raises(UserError, match=f"no statistics file .*{tmp_path.name}"):
        load_statistics(loaded)
    measured = measure_statistics(loaded, SAMPLES)
    measured.save(tmp_path / FILE_NAME)
    assert not list(tmp_path.glob("*.tmp"))
    found = load_statistics(loaded)
    assert found.origin == measured.origin and found.origin.samples == 2
    assert all(torch.equal(found.tensors[name], x) for name, x in measured.tensors.items())


def test_foreign_and_stale_files_are_refused_by_name(tmp_path) -> None:
    path, model = tmp_path / "s.safetensors", tiny_model()
    measure_statistics(tiny_model(layers=3), SAMPLES[:1]).save(path)
    with pytest.raises(UserError, match=r"s\.safetensors was made for another model"):
        load_statistics(model, path)
    measure_statistics(model, SAMPLES[:1]).save(path)
    load_statistics(model.to(torch.bfloat16), path)
    model.model.language_model.layers[1].self_attn.q_proj.weight.data *= 1.01
    with pytest.raises(UserError, match=r"s\.safetensors is stale"):
        load_statistics(model, path)


@pytest.mark.parametrize("metadata", [None, {"origin": "{"}, {"origin": json.dumps({"model": "x"})}])
def test_other_files_are_refused_by_name(tmp_path, metadata) -> None:
    path = tmp_path / "s.safetensors"
    save_file({"x": torch.zeros(1)}, path, metadata=metadata)
    with pytest.raises(UserError, match=r"s\.safetensors is not a statistics file"):
        Statistics.load(path)
    path.write_text("{}")
    with pytest.raises(UserError, match=r"s\.safetensors is not a statistics file"):
        Statistics.load(path)
