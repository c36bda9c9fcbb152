"""The device that everything here runs on."""

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda")
