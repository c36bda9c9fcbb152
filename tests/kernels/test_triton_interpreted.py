"""The grid of `triton_grid` on the CPU: in Triton's interpreter, so in a process where triton is imported that way."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

GRID = Path(__file__).parent / "triton_grid"


@pytest.mark.parametrize("name", ["attention", "operators", "quantize", "similarity"])
def test_grid(name: str) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    options = ["-q", "-p", "no:cacheprovider", f"--confcutdir={GRID}", "--override-ini=addopts=--import-mode=importlib"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(GRID / f"{name}.py")],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=GRID.parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-10000:] + done.stderr[-2000:]
    assert re.search(r"^\d+ passed(, \d+ warnings?)? in ", done.stdout.splitlines()[-1]), done.stdout[-500:]
