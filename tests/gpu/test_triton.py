"""The grid of `tests/kernels/triton_grid` on a CUDA device, tuned and compiled."""

# ruff: noqa: F403
import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("triton", reason="triton is not installed")

from tests.kernels.triton_grid.attention import *
from tests.kernels.triton_grid.operators import *
from tests.kernels.triton_grid.quantize import *
from tests.kernels.triton_grid.similarity import *
