"""What the benchmark commands do with their configuration: measure, write a record, and build what shows it."""

import sys
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import nn

from windowquant.bench import record
from windowquant.bench.decode import DecodeSettings, measure_decode
from windowquant.bench.kernels import dtype_of, measure_kernels
from windowquant.bench.overhead import measure_overhead
from windowquant.bench.packing import measure_packing
from windowquant.bench.search import measure_search
from windowquant.bench.settings import cuda_device, decode_settings, kernel_settings, plain
from windowquant.bench.shapes import text_shape
from windowquant.bench.synthetic import random_model
from windowquant.bench.timing import threads
from windowquant.report.bench import build_reports

CPU = torch.device("cpu")


def kernels_command(cfg: DictConfig) -> None:
    """Latency of attention, and the copy bandwidth, on the CPU: `<output>/<name>.json` and its table and figure."""
    settings = kernel_settings(cfg.kernels)
    _finish(cfg, "kernels", CPU, measure_kernels(settings, CPU, _tell))


def decode_command(cfg: DictConfig) -> None:
    """Decoding, packing, the search and the loop's overhead on the CPU: `<output>/<name>.json`, tables and figures."""
    _finish(cfg, "decode", CPU, _decode_sections(cfg, CPU))


def gpu_command(cfg: DictConfig) -> None:
    """Both on a CUDA device: `<output>/<card>.json`. UserError without one."""
    device = cuda_device()
    card = torch.cuda.get_device_name(device).lower().replace(" ", "_").replace("/", "_")
    record.write(Path(cfg.output) / f"{card}.json", "gpu", plain(cfg), device, gpu_sections(cfg, device))
    print(Path(cfg.output) / f"{card}.json")


def gpu_sections(cfg: DictConfig, device: torch.device) -> dict[str, Any]:
    """What the GPU's record holds; the device may be another one."""
    return {**measure_kernels(kernel_settings(cfg.kernels), device, _tell), **_decode_sections(cfg, device)}


def _tell(progress: str) -> None:
    print(progress, file=sys.stderr, flush=True)


def _finish(cfg: DictConfig, kind: str, device: torch.device, sections: dict[str, Any]) -> None:
    folder = Path(cfg.output)
    record.write(folder / f"{cfg.name}.json", kind, plain(cfg), device, sections)
    built = build_reports(folder, cfg.name, kind)
    print("\n".join(map(str, [folder / f"{cfg.name}.json", *built])))


def _decode_sections(cfg: DictConfig, device: torch.device) -> dict[str, Any]:
    settings = decode_settings(cfg.decode)
    shape = text_shape(settings.shape)
    table9 = kernel_settings(cfg.attention)  # everything is checked before anything is measured
    _tell(f"A random model of shape {settings.shape} ...")
    model = random_model(shape, settings.dtype, device)
    rows = measure_decode(settings, model, device, _tell)
    _tell("packing, search, overhead ...")
    packing = _packing(cfg, settings, model, device)
    with threads(max(settings.threads)):
        search = measure_search(shape, cfg.search.visual_tokens, settings.dtype, device, cfg.search.rounds)
    return {
        "decode": rows,
        "attention": measure_kernels(table9, device, _tell)["kernels"],
        "packing": packing,
        "search": search,
        "overhead": measure_overhead(cfg.overhead.episodes),
    }


def _packing(cfg: DictConfig, settings: DecodeSettings, model: nn.Module, device: torch.device) -> list[dict[str, Any]]:
    """Rows of `measure_packing` for the measured model and a small one, for each number of threads."""
    own = cfg.packing
    small = random_model(text_shape(own.small_shape), dtype_of("float32"), device)
    rows = []
    for count in settings.threads if device.type == "cpu" else [torch.get_num_threads()]:
        for name, each, sizes, repeats in (
            (settings.shape, model, own.visual_tokens, own.repeats),
            (own.small_shape, small, own.small_visual_tokens, own.small_repeats),
        ):
            with threads(count):
                measured = [measure_packing(each, text_shape(name), visual, repeats) for visual in sizes]
            rows += [{"shape": name, "threads": count, **row} for row in measured]
    return rows
