"""Calibration files: what is in them, and which are refused."""

import json

import pytest
import torch

from tests.vlm import batch_inputs, tiny_model, video_ids, video_inputs, words
from windowquant.calibration import FILE_NAME, Calibration, calibrate_sensitivity, load_for
from windowquant.errors import UserError
from windowquant.method import get_method


def plain_sensitivities(model, inputs) -> list[float]:
    """Mean cosine of what enters a layer and what enters its MLP's norm, token by token, padding left out."""
    seen: dict[int, list[torch.Tensor]] = {}
    hooks = []
    for index, layer in enumerate(model.model.language_model.layers):
        for part in (layer.input_layernorm, layer.post_attention_layernorm):
            hooks.append(part.register_forward_pre_hook(lambda m, a, i=index: seen.setdefault(i, []).append(a[0])))
    with torch.no_grad():
        model(**inputs)
    for hook in hooks:
        hook.remove()
    on = inputs["attention_mask"].bool()
    values = []
    for before, after in seen.values():
        a, b = before[on].double(), after[on].double()
        values.append(float(((a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1))).mean()))
    return values


SAMPLES = [video_inputs(frames=4), video_inputs(frames=6, after=9, seed=3)]


def test_values_are_the_mean_over_samples() -> None:
    model = tiny_model()
    model(**SAMPLES[0])  # transformers keeps hooks of its own from the first call on
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    got = calibrate_sensitivity(model, SAMPLES)
    assert [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()] == hooks
    each = [plain_sensitivities(model, sample) for sample in SAMPLES]
    assert got.values == pytest.approx([sum(pair) / 2 for pair in zip(*each, strict=True)], abs=1e-5)
    assert got.samples == 2


def test_padding_does_not_count() -> None:
    model = tiny_model()
    sample = batch_inputs([video_ids(4, 3, 12), words(4)], 4)
    assert calibrate_sensitivity(model, [sample]).values == pytest.approx(plain_sensitivities(model, sample), abs=1e-5)


def test_the_hash_names_the_samples() -> None:
    model = tiny_model()
    one, two = (calibrate_sensitivity(model, [sample]).sample_hash for sample in SAMPLES)
    assert one != two and calibrate_sensitivity(model, SAMPLES[:1]).sample_hash == one


def test_round_trip_and_nothing_half_written(tmp_path) -> None:
    calibration = calibrate_sensitivity(tiny_model(), SAMPLES[:1])
    calibration.save(tmp_path / "c.json")
    assert Calibration.load(tmp_path / "c.json") == calibration
    assert [path.name for path in tmp_path.iterdir()] == ["c.json"]


def test_bind_finds_the_file_beside_the_checkpoint(tmp_path) -> None:
    model = tiny_model()
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    with pytest.raises(UserError, match=f"no {FILE_NAME} in .*{tmp_path.name}.*online"):
        get_method("windowquant").bind(loaded)
    calibration = calibrate_sensitivity(loaded, SAMPLES)
    calibration.save(tmp_path / FILE_NAME)
    assert get_method("windowquant").bind(loaded).sensitivity == calibration.values
    elsewhere = tmp_path / "elsewhere.json"
    calibration.save(elsewhere)
    assert get_method("windowquant", sensitivity=str(elsewhere)).bind(model).sensitivity == calibration.values


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_same_weights_in_16_bit_are_the_same_model(tmp_path, dtype: torch.dtype) -> None:
    model = tiny_model()
    calibrate_sensitivity(model, SAMPLES[:1]).save(tmp_path / "c.json")
    load_for(model.to(dtype), tmp_path / "c.json")


def test_a_file_of_another_model_is_refused_by_name(tmp_path) -> None:
    path = tmp_path / "c.json"
    calibrate_sensitivity(tiny_model(layers=3), SAMPLES[:1]).save(path)
    with pytest.raises(UserError, match=r"c\.json was made for another model \(llava_onevision\)"):
        load_for(tiny_model(), path)


def test_a_stale_file_is_refused_by_name(tmp_path) -> None:
    path, model = tmp_path / "c.json", tiny_model()
    calibrate_sensitivity(model, SAMPLES[:1]).save(path)
    load_for(model, path)
    weight = model.model.language_model.layers[1].self_attn.q_proj.weight
    weight.data *= 1.01
    with pytest.raises(UserError, match=r"c\.json is stale"):
        load_for(model, path)


@pytest.mark.parametrize("text", ["", "{", "[1]", "{}", json.dumps({"values": [1.0]}), json.dumps({"other": 1})])
def test_other_files_are_refused_by_name(tmp_path, text: str) -> None:
    path = tmp_path / "c.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"c\.json is not a calibration file"):
        Calibration.load(path)


def test_missing_file_and_missing_samples_are_told(tmp_path) -> None:
    with pytest.raises(UserError, match="no calibration file .*nowhere"):
        Calibration.load(tmp_path / "nowhere.json")
    with pytest.raises(UserError, match="no sample"):
        calibrate_sensitivity(tiny_model(), [])
