"""Choosing a backend."""

import pytest
import torch

from windowquant.errors import UserError
from windowquant.kernels import backend_names, get_backend, reference


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")])
def test_default_and_by_name(device: torch.device | str) -> None:
    assert get_backend(None, device) is reference.attend
    assert get_backend("reference", device) is reference.attend
    assert "reference" in backend_names()


def test_unknown_backend_lists_the_known_ones() -> None:
    with pytest.raises(UserError, match="There is no attention backend 'cuda-magic'; use one of .*reference"):
        get_backend("cuda-magic")
