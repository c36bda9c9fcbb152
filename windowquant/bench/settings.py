"""Benchmark settings from composed configurations, checked before anything is measured."""

from collections.abc import Sequence
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from windowquant.bench.decode import DecodeSettings, Section
from windowquant.bench.kernels import KernelSettings, dtype_of
from windowquant.bench.shapes import text_shape
from windowquant.errors import UserError


def plain(cfg: DictConfig) -> dict[str, Any]:
    """The configuration as plain values, for a record; without Hydra's own part, and without where it is written."""
    values = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items() if key not in ("hydra", "output", "name")}


def kernel_settings(cfg: DictConfig) -> KernelSettings:
    """From the part `kernels`; UserError for a value that cannot be."""
    own = plain(cfg)
    _check_counts(own, "rounds", "batch", "window", "copy_mebibytes")
    _check_threads(own["threads"])
    return KernelSettings(**own)


def decode_settings(cfg: DictConfig) -> DecodeSettings:
    """From the part `decode`; UserError for a value that cannot be."""
    own = plain(cfg)
    text_shape(own["shape"])
    _check_counts(own, "steps")
    _check_threads(own["threads"])
    sections = {name: Section(**section) for name, section in own.pop("sections").items()}
    return DecodeSettings(**{**own, "dtype": dtype_of(own["dtype"]), "sections": sections})


def _check_counts(values: dict[str, Any], *names: str) -> None:
    for name in names:
        if isinstance(values[name], bool) or not isinstance(values[name], int) or values[name] < 1:
            raise UserError(f"{name} is {values[name]!r}; give a whole number, 1 or more.")


def _check_threads(counts: Sequence[Any]) -> None:
    if not counts or not all(isinstance(count, int) and count >= 1 for count in counts):
        raise UserError(f"threads is {counts!r}; give a list of numbers of threads, such as [1,2].")


def cuda_device() -> torch.device:
    """The CUDA device; UserError where there is none."""
    if not torch.cuda.is_available():
        raise UserError(
            "There is no CUDA device here: run make bench-gpu on a machine with one, or make bench-kernels and make "
            "bench-decode, which measure the CPU."
        )
    return torch.device("cuda")
