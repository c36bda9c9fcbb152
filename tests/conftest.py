"""Fixtures that several parts of the tests share."""

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "disabled")

import pytest
import torch
from datasets import disable_progress_bars

from tests.tiny import save_tiny_llava, write_data

torch.set_num_threads(1)
disable_progress_bars()


@pytest.fixture(scope="session")
def tiny_llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a saved LLaVA-OneVision with random weights (2 layers, 2 KV heads of 8 channels), and its processor."""
    return save_tiny_llava(tmp_path_factory.mktemp("tiny_llava"))


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data root with 4 questions on 2 videos, for NExT-QA and EgoSchema each."""
    return write_data(tmp_path_factory.mktemp("tiny_data"))
