"""The Triton kernels compiled ahead of time, and the committed report of it."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kernels.build import Shape, build, queries
from windowquant import kernels
from windowquant.errors import UserError

pytest.importorskip("triton", reason="triton is not installed")

from windowquant.kernels.triton_attention import attend
from windowquant.kernels.triton_compile import CAPABILITIES, compile_launch, configs_of, name_of
from windowquant.kernels.triton_launches import launches
from windowquant.report.triton_report import FOLDER, source_hash, to_markdown
from windowquant.report.triton_report import build as build_report

REPORT = json.loads((FOLDER / "aot.json").read_text())


def _kernels() -> set[str]:
    """Names of all tuned kernels there are."""
    modules = [path.stem for path in Path(kernels.__file__).parent.glob("triton_*.py")]
    loaded = (vars(import_module(f"windowquant.kernels.{module}")) for module in modules)
    return {name_of(value) for names in loaded for value in names.values() if hasattr(value, "early_config_prune")}


def test_attention_compiles_for_sm_90_and_spills_nothing() -> None:
    launch = next(iter(launches()))
    assert name_of(launch.kernel) == "attend_kernel"
    taken = compile_launch(launch, configs_of(launch)[0], 90)
    assert taken.spilled == 0 and 0 < taken.registers <= 255 and 0 < taken.shared <= 227 * 1024


def test_the_report_covers_every_kernel_and_launch_on_every_capability() -> None:
    entries = REPORT["entries"]
    assert {entry["kernel"] for entry in entries} == _kernels() == {name_of(launch.kernel) for launch in launches()}
    found = {(entry["kernel"], entry["shape"], entry["capability"]) for entry in entries}
    assert found == {(name_of(x.kernel), x.shape, capability) for x in launches() for capability in CAPABILITIES}


def test_nothing_in_the_report_spills() -> None:
    assert [entry for entry in REPORT["entries"] if entry["spilled"]] == []


def test_the_report_is_of_this_source() -> None:
    assert REPORT["source"] == source_hash(), "the kernels changed: run make triton-report and commit results/triton"


def test_markdown_is_a_view_of_the_json() -> None:
    text = (FOLDER / "aot.md").read_text()
    assert text == to_markdown(REPORT) and f"0 of {len(REPORT['entries'])} compiled kernels spill registers" in text


def test_a_report_of_one_small_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windowquant.report.triton_report.CAPABILITIES", (90,))
    launch = next(x for x in launches() if name_of(x.kernel) == "combine_kernel")
    report: dict[str, Any] = build_report([launch])
    committed = [
        x
        for x in REPORT["entries"]
        if (x["kernel"], x["shape"], x["capability"]) == ("combine_kernel", launch.shape, 90)
    ]
    assert report["source"] == source_hash() and len(report["entries"]) == 1
    if report["triton"] == REPORT["triton"]:
        assert report["entries"] == committed


def test_tensors_on_the_cpu_are_refused() -> None:
    shape = Shape()
    with pytest.raises(UserError, match="was given tensors on cpu; move them to a CUDA device"):
        attend(queries(shape, 1).half(), build(shape, (4,)).layer, None, 0.2)


def test_configurations_have_enough_warps_for_the_tile() -> None:
    """32 rows of 128 channels are 4,096 sums: with 2 warps 64 for each thread."""
    by_rows = {
        x.values["BLOCK"]: configs_of(x)
        for x in launches()
        if x.values.get("D") == 128 and "INT4+2, float16" in x.shape and name_of(x.kernel) == "attend_kernel"
    }
    assert {rows: min(c.num_warps for c in configs) for rows, configs in by_rows.items()} == {16: 1, 32: 2}
    assert all(torch.cuda.is_available() or config.maxnreg == 255 for configs in by_rows.values() for config in configs)
