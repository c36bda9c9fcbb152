"""The device, where the grid is run by itself: the CPU, in the interpreter."""

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu")
