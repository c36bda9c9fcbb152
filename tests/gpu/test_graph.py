"""A decode step inside a CUDA graph."""

import pytest
import torch

from tests.kernels.build import Shape, build, queries, relative_error
from tests.kernels.triton_grid.on_device import moved
from windowquant.kernels import get_backend, reference

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)


@pytest.mark.parametrize("in_place", [False, True])
def test_attention_is_captured_and_replayed(in_place: bool, device: torch.device) -> None:
    attend = get_backend(None, device)
    shape = Shape(batch=2, group=7, channels=128, window=16)
    layer = moved(build(shape, (16, 4, 2, 2, 4, 16, 2), in_place=in_place).layer, device)
    q = queries(shape, 1).half().to(device)
    attend(q, layer, None, 0.1)  # tunes, and makes the table
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(q, layer, None, 0.1)
    for seed in (2, 3):
        q.copy_(queries(shape, 1, seed))
        graph.replay()
        assert relative_error(out, reference.attend(q, layer, None, 0.1).double()) <= 2e-3
