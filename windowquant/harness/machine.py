"""Facts about the machine, the software and the state of the source that a record carries."""

import importlib.metadata as metadata
import platform
import subprocess
from functools import lru_cache
from pathlib import Path
from typing import Any

import psutil
import torch

PACKAGES = ("windowquant", "torch", "transformers", "lmms_eval", "datasets", "tokenizers", "numpy", "av")
PROJECT = Path(__file__).resolve().parents[2]


@lru_cache(maxsize=1)
def package_versions() -> dict[str, str]:
    """Installed version of each package that can change a number."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # run from a source tree that was not installed
            found[name] = "not installed"
    return found


def cpu_name() -> str:
    """Model name of the CPU, or the architecture where the system does not tell."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def gpu_name(device: torch.device) -> str | None:
    """Name of the CUDA device, None on a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def git_state() -> tuple[str | None, bool | None]:
    """(commit, whether tracked files differ from it); (None, None) outside a repository."""
    commit = _git("rev-parse", "HEAD")
    if commit is None:
        return None, None
    return commit, bool(_git("status", "--porcelain", "--untracked-files=no"))


def _git(*words: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(PROJECT), *words], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


class PeakMemory:
    """Peak memory since `start`: resident set of the process, and bytes allocated on the CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def start(self) -> None:
        """Forget earlier peaks, so that runs sharing a process do not inherit each other's."""
        reset = Path("/proc/self/clear_refs")
        if reset.exists():
            reset.write_text("5")
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def read(self) -> dict[str, int | None]:
        """Bytes: `rss`, `cuda` (None on a CPU)."""
        status = Path("/proc/self/status")
        lines = status.read_text().splitlines() if status.exists() else []
        peak = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)
        cuda = torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else None
        return {"rss": peak or psutil.Process().memory_info().rss, "cuda": cuda}


def describe(device: torch.device) -> dict[str, Any]:
    """Everything above that does not change during a run."""
    commit, dirty = git_state()
    return {
        "packages": package_versions(),
        "python": platform.python_version(),
        "cpu": cpu_name(),
        "gpu": gpu_name(device),
        "threads": torch.get_num_threads(),
        "git_commit": commit,
        "git_dirty": dirty,
    }
