"""Checkpoints: found by folder or name, identified by content, refused with a sentence."""

import shutil
from pathlib import Path

import pytest
import torch

from windowquant.errors import UserError
from windowquant.harness import loading
from windowquant.harness.loading import find, load
from windowquant.harness.settings import ModelSettings

CPU = torch.device("cpu")


def test_a_folder_is_identified_by_its_content(tiny_llava: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_llava, tmp_path / "copy")
    assert find(str(tmp_path / "copy")).fingerprint == find(str(tiny_llava)).fingerprint
    config = tmp_path / "copy" / "config.json"
    shutil.copytree(tmp_path / "copy", tmp_path / "changed")
    (tmp_path / "changed" / "config.json").write_text(config.read_text() + " ")
    assert find(str(tmp_path / "changed")).fingerprint != find(str(tiny_llava)).fingerprint


def test_large_files_are_identified_by_size_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_WHOLE_FILE", 1 << 20)
    prints = set()
    for name, position in (("a", None), ("b", 0), ("c", -1)):
        folder = tmp_path / name
        folder.mkdir()
        weights = bytearray(3 << 20)
        if position is not None:
            weights[position] = 1
        (folder / "model.safetensors").write_bytes(weights)
        prints.add(loading.hash_folder(str(folder)))
    assert len(prints) == 3


def test_an_embedded_checkpoint_is_found_by_name(
    tiny_llava: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "CHECKPOINTS", tmp_path)
    shutil.copytree(tiny_llava, tmp_path / "llava_onevision")
    checkpoint = find("mini_llava_onevision")
    assert checkpoint.source == "mini_llava_onevision"
    assert load(ModelSettings("m", "mini_llava_onevision", 4), CPU).checkpoint == checkpoint
    with pytest.raises(UserError, match=r"Unknown model 'mini_gpt': .* embedded checkpoint \(mini_llava_onevision\)"):
        find("mini_gpt")


@pytest.mark.parametrize("name", ["nothing_here", "/nowhere/at/all", "./gone", "a/b/c"])
def test_an_unknown_model_is_told(name: str) -> None:
    with pytest.raises(UserError, match="Unknown model"):
        find(name)


def test_a_hub_model_that_cannot_be_fetched_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="'nobody/nothing' is neither in the local cache nor can it be fetched"):
        find("nobody/nothing")


def test_a_folder_that_holds_something_else_is_told(tmp_path: Path, tiny_llava: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "unheard_of"}')
    with pytest.raises(UserError, match="cannot be loaded as an image-text-to-text model"):
        load(ModelSettings("m", str(tmp_path), 4), CPU)


def test_a_model_is_loaded_once(tiny_llava: Path) -> None:
    settings = ModelSettings("m", str(tiny_llava), 4)
    assert load(settings, CPU) is load(settings, CPU)
    assert not load(settings, CPU).model.training
