"""Choosing a backend."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import windowquant.kernels as kernels
from windowquant.core.similarity import window_means
from windowquant.errors import UserError
from windowquant.kernels import (
    backend_names,
    get_backend,
    get_packer,
    get_quantizer,
    get_window_means,
    reference,
    triton_quantize,
    triton_similarity,
)
from windowquant.kernels.cpu import attention, quantize


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")])
def test_default_and_by_name(device: torch.device | str) -> None:
    assert get_backend(None, device) is get_backend("cpu", device) is attention.attend
    assert get_backend("reference", device) is reference.attend
    assert {"cpu", "reference", "triton"} <= set(backend_names())


def test_unknown_backend_lists_the_known_ones() -> None:
    with pytest.raises(UserError, match="There is no attention backend 'cuda-magic'; use one of .*reference"):
        get_backend("cuda-magic")


def test_triton_needs_a_cuda_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UserError, match="'triton' needs a CUDA device, but the model is on cpu"):
        get_backend("triton", "cpu")


def test_cpu_needs_the_model_there() -> None:
    with pytest.raises(UserError, match="'cpu' computes on the CPU, but the model is on cuda"):
        get_backend("cpu", "cuda")


def test_other_devices_have_the_reference() -> None:
    assert get_backend(None, "meta") is reference.attend


@pytest.mark.parametrize(
    ("name", "device", "package"), [("triton", "cpu", "triton"), (None, "cuda", "triton"), (None, "cpu", "numba")]
)
def test_missing_package_is_named(name: str | None, device: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_installed", lambda package: False)
    with pytest.raises(UserError, match=f"needs the package {package}, which is not installed"):
        get_backend(name, device)


def test_packer_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(1, 1, 32, 32)
    assert get_packer(x, "window_channel", torch.float16) is quantize.store_tokens
    assert get_packer(x, "token", torch.float16) is None
    assert get_packer(x[..., :8], "window_channel", torch.float16) is None
    assert get_packer(x.to("meta"), "window_channel", torch.float16) is None
    assert get_packer(x.transpose(2, 3), "window_channel", torch.float16) is None
    assert get_quantizer(x, "window_channel", torch.float16) is None
    monkeypatch.setattr(kernels, "_installed", lambda package: False)
    monkeypatch.setattr(kernels, "_packer", kernels._packer.__wrapped__)  # which remembers nothing
    assert get_packer(x, "window_channel", torch.float16) is None


def test_on_a_gpu_windows_are_quantized_and_scored_by_the_triton_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    x = SimpleNamespace(device=cuda)
    for granularity in ("window_channel", "token"):
        assert get_quantizer(x, granularity, torch.bfloat16) is triton_quantize.quantize_windows
    assert get_quantizer(x, "tensor", torch.float16) is None
    assert get_quantizer(x, "token", torch.float32) is None
    assert get_window_means(cuda) is triton_similarity.window_means
    assert get_window_means(torch.device("cpu")) is window_means
    monkeypatch.setattr(kernels, "_installed", lambda package: False)
    assert get_quantizer(x, "token", torch.float16) is None
    assert get_window_means(cuda) is window_means


def test_importing_the_package_imports_no_compiler() -> None:
    code = (
        "import sys, windowquant.kernels\n"
        "windowquant.kernels.get_backend('reference')\n"
        "assert not {'numba', 'triton'} & set(sys.modules), 'imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
