"""A language model that starts from another stand-in's, and the command that trains one."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from transformers import AutoModelForImageTextToText, AutoProcessor

from tests.mini.untrained import language_of
from windowquant.calibration import load_for
from windowquant.errors import UserError
from windowquant.mini.architectures import ARCHITECTURES, architecture
from windowquant.mini.tokenizer import build_tokenizer
from windowquant.mini.training import run
from windowquant.mini.training.main import train_command
from windowquant.mini.training.warm_start import find_source, sha256, warm_start

ROOT = Path(__file__).resolve().parents[2]
OTHERS = [name for name in ARCHITECTURES if name != "llava_onevision"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained LLaVA-OneVision whose seed is not that of the others."""
    folder, kind = tmp_path_factory.mktemp("source"), architecture("llava_onevision")
    tokenizer = kind.build_tokenizer()
    kind.build_model(tokenizer, seed=5).save_pretrained(folder)
    kind.build_processor(tokenizer).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", OTHERS)
def test_layers_words_and_head_are_the_sources(name: str, source: Path) -> None:
    kind = architecture(name)
    tokenizer = kind.build_tokenizer()
    model, untouched = kind.build_model(tokenizer, seed=0), language_of(name).model
    warm_start(model, tokenizer, source)
    other = AutoModelForImageTextToText.from_pretrained(source)
    theirs = other.model.language_model.state_dict()
    tables = {"embed_tokens.weight": model.model.language_model.embed_tokens.weight, "head": model.lm_head.weight}
    given = {"embed_tokens.weight": theirs["embed_tokens.weight"], "head": other.lm_head.weight}
    fresh = {
        "embed_tokens.weight": untouched.model.language_model.embed_tokens.weight,
        "head": untouched.lm_head.weight,
    }
    words = len(language_of("llava_onevision").tokenizer)
    same = [k for k in range(words) if k not in (3, 4)]  # the placeholders may have other names, and no meaning
    for key, table in tables.items():
        assert torch.equal(table[same], given[key][same])
        assert len(table) > words and torch.equal(table[words:], fresh[key][words:])
    for key, value in model.model.language_model.state_dict().items():
        assert key == "embed_tokens.weight" or torch.equal(value, theirs[key])
    assert not tables["embed_tokens.weight"].requires_grad


def test_the_same_text_has_the_same_logits_in_every_architecture(source: Path) -> None:
    logits = []
    for name in ARCHITECTURES:
        kind = architecture(name)
        tokenizer = kind.build_tokenizer()
        model = kind.build_model(tokenizer, seed=0).eval()
        warm_start(model, tokenizer, source)
        ids = torch.tensor([tokenizer.encode("what is the man doing in the garden\nA. wave")])
        with torch.no_grad():
            logits.append(model(input_ids=ids).logits[0, :, 5:500])
    assert torch.allclose(logits[0], logits[1], atol=1e-4) and torch.allclose(logits[0], logits[2], atol=1e-4)


def test_a_source_is_a_folder_or_the_name_of_an_embedded_checkpoint(source: Path) -> None:
    assert find_source(str(source)) == source
    assert find_source("mini_llava_onevision") == ROOT / "windowquant/mini/checkpoints/llava_onevision"
    with pytest.raises(UserError, match="warm_start is 'nowhere': give a folder"):
        find_source("nowhere")


def test_a_source_that_does_not_know_the_words_is_refused(source: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(source, tmp_path / "other")
    build_tokenizer(vocabulary=300).save_pretrained(folder)
    with pytest.raises(UserError, match="does not know the token '"):
        warm_start(language_of("internvl").model, language_of("internvl").tokenizer, folder)


def test_a_source_of_another_size_is_refused(source: Path, tiny_llava: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_llava, tmp_path / "tiny")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / file, folder / file)
    with pytest.raises(UserError, match="has another shape"):
        warm_start(language_of("internvl").model, language_of("internvl").tokenizer, folder)


@pytest.fixture
def few_stills(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "HELD_OUT_STILLS", 1)


RECIPE = run.Recipe(
    seed=0,
    stills=1,
    vision_steps=1,
    vision_batch=4,
    vision_rate=1e-3,
    tiny_steps=1,
    tiny_rate=1e-3,
    short_steps=0,
    short_rate=1e-3,
    long_steps=0,
    long_rate=1e-3,
    last_steps=0,
    last_rate=1e-3,
    report_every=50,
)


@pytest.mark.usefixtures("few_stills")
def test_given_words_stay_as_they_are_through_the_stages(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "video_report", lambda *_: {})
    monkeypatch.setattr(run, "letter_report", lambda *_: {})
    monkeypatch.setattr(run, "TINY", run.Level(16, (2, 4), 2, 1, 1))
    model = run.train(RECIPE, architecture("qwen2_vl"), source, tmp_path)
    other = AutoModelForImageTextToText.from_pretrained(source)
    words = len(language_of("llava_onevision").tokenizer)
    found, given = (m.model.language_model.embed_tokens.weight for m in (model, other))
    assert torch.equal(found[5:words], given[5:words])
    changed = [m.model.language_model.layers[0].mlp.up_proj.weight for m in (model, other)]
    assert not torch.equal(*changed)
    assert {path.name for path in tmp_path.iterdir()} == {"vision.safetensors", "tiny.safetensors", "log.jsonl"}


# ---- the command


def composed(*overrides: str) -> DictConfig:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return compose("train_mini", [*overrides, "threads=1"])


@pytest.mark.usefixtures("few_stills")
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_command_writes_a_checkpoint(
    name: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    none = [f"recipe.{stage}_steps=0" for stage in ("tiny", "short", "long", "last")]
    short = ["recipe.stills=1", "recipe.vision_steps=2", "recipe.vision_batch=4", "recipe.report_every=2"]
    start = "null" if name == "llava_onevision" else str(source)
    train_command(composed(f"architecture={name}", f"warm_start={start}", f"folder={tmp_path}/run", *none, *short))
    checkpoint, told = tmp_path / "run" / "checkpoint", capsys.readouterr().out
    assert f"checkpoint: {checkpoint}" in told
    assert (f"sha256 {sha256(source)}" in told) == (start != "null")
    log = [json.loads(line) for line in (checkpoint / "training_log.jsonl").read_text().splitlines()]
    assert [(line["stage"], line["step"]) for line in log] == [("vision", 2)]
    model = AutoModelForImageTextToText.from_pretrained(checkpoint)
    assert model.config.model_type == name
    assert len(load_for(model).values) == 4
    processor = architecture(name).build_processor(language_of(name).tokenizer)
    assert type(AutoProcessor.from_pretrained(checkpoint)) is type(processor)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_has_a_recipe_and_a_folder_of_its_own(name: str) -> None:
    cfg = composed(f"architecture={name}", "recipe.seed=7")
    assert (cfg.architecture, cfg.folder) == (name, f"outputs/train_mini/{name}/7")
    assert (cfg.warm_start is None) == (name == "llava_onevision")
    assert set(cfg.recipe) == set(run.Recipe.__annotations__)


@pytest.mark.parametrize(
    ("override", "told"),
    [("warm_start=nowhere", "warm_start is 'nowhere': give a folder"), ("recipe.seed=one", "^recipe: .*seed")],
)
def test_a_wrong_value_is_told_before_anything_is_written(override: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=told):
        train_command(composed(override, f"folder={tmp_path}/run"))
    assert not (tmp_path / "run").exists()


def test_an_unknown_architecture_ends_the_command_with_a_sentence(tmp_path: Path) -> None:
    script = [sys.executable, "scripts/train_mini.py", "architecture=gpt", f"folder={tmp_path}/run"]
    done = subprocess.run(script, capture_output=True, text=True, cwd=ROOT)
    told = "Unknown architecture 'gpt': the known ones are internvl, llava_onevision, qwen2_vl."
    assert done.returncode == 2 and done.stderr.strip() == told
