"""Misspelt names are told before anything heavy is imported, and name what there is instead."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "transformers", "lmms_eval", "datasets", "matplotlib", "wandb")
PROBE = f"""
import runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    print("imported:", *(name for name in {HEAVY} if name in sys.modules))
"""


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["run", "method=windwoquant"], "Unknown method 'windwoquant': the known ones are "),
        (["run", "metod=fp16"], "The configuration has no setting 'metod': it has "),
        (["run", "-m", "method.alhpa=1,2"], "method has no setting 'alhpa': it has name, alpha, "),
        (["table", "experiment=tabel1"], "Unknown experiment 'tabel1': the known ones are "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_misspelt_name_costs_no_heavy_import(words: list[str], sentence: str) -> None:
    command = [sys.executable, "-c", PROBE, f"scripts/{words[0]}.py", *words[1:]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(sentence)
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout.strip() == "imported:"
