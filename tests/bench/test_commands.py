"""The benchmark commands from end to end on tiny shapes: records, what is built from them, and refusals."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.core.global_hydra import GlobalHydra

from windowquant.bench import overhead
from windowquant.bench.commands import gpu_sections
from windowquant.bench.record import load
from windowquant.errors import UserError
from windowquant.harness.command import command, composed
from windowquant.report.bench import build_reports

Run = Callable[..., int]
KERNELS = (
    "kernels.shapes=[tiny]", "kernels.contexts=[64,100]", "kernels.threads=[1]", "kernels.rounds=2",
    "kernels.backend=reference", "kernels.stock_up_to=64",
    "kernels.copy_mebibytes=1",
)  # fmt: skip
SECTIONS = [
    f"decode.sections.{name}.{field}"
    for name, batch in (("cache_size", 1), ("batch", 2), ("alpha", 1), ("table8", 2), ("table9", 2))
    for field in (f"batches=[{batch}]", "visual_tokens=[256]")
]
DECODE = (
    "decode.shape=tiny", "decode.threads=[1]", "decode.steps=2", "decode.backend=reference", *SECTIONS,
    "attention.contexts=[64]", "attention.batch=2", "attention.rounds=2", "attention.copy_mebibytes=1",
    "packing.visual_tokens=[64]", "packing.small_shape=tiny", "packing.small_visual_tokens=[32]",
    "packing.repeats=2", "packing.small_repeats=3",
    "search.visual_tokens=128", "search.rounds=2", "overhead.episodes=1",
    "decode.sections.cache_size.visual_tokens=[128,256]",
)  # fmt: skip


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Run a benchmark command with the given words, writing into `tmp_path`; its exit code."""

    def run(kind: str, *words: str) -> int:
        GlobalHydra.instance().clear()
        monkeypatch.setattr(sys, "argv", ["bench.py", *words, f"output={tmp_path}"])
        try:
            command(f"bench_{kind}", f"windowquant.bench.commands.{kind}_command")
        except SystemExit as stop:
            return int(stop.code or 0)
        return 0

    return run


def check_kernel_rows(rows: list[dict[str, Any]]) -> None:
    """All contenders are there, each with a time and the bytes that it has to read."""
    names = {row["contender"] for row in rows if row["visual_tokens"] == 64}
    assert names >= {
        "windowquant fp16", "windowquant int8", "windowquant int4", "windowquant int2", "windowquant paper",
        "windowquant paper, step", "unfused", "SDPA as transformers calls it", "SDPA, query group as rows",
        "DynamicCache, step", "QuantizedCache hf_quanto, step", "QuantizedCache hf_hqq, step",
        "QuantizedCache hf_fp8, step",
    }  # fmt: skip
    assert all(row["seconds"]["n"] == 2 and row["seconds"]["median"] > 0 for row in rows)
    by_name = {(row["contender"], row["dtype"]): row["needed_bytes"] for row in rows if row["visual_tokens"] == 64}
    elements = 2 * 2 * 8 * (8 + 64 + 24)  # K and V, heads, channels, tokens
    assert by_name["SDPA as transformers calls it", "float32"] == 4 * elements
    assert by_name["windowquant fp16", "float32"] == 2 * elements  # stored in float16
    assert {dtype for name, dtype in by_name if name == "windowquant paper"} == {"float32", "bfloat16"}
    windows, text = 2 * 2 * 8 * 64, 2 * 2 * 8 * 32
    assert by_name["windowquant int2", "float32"] == windows * 2 // 8 + windows * 4 // 32 + 2 * text


def test_kernels_write_a_record_a_table_and_a_figure(call: Run, tmp_path: Path) -> None:
    assert call("kernels", *KERNELS) == 0
    record = load(tmp_path / "kernels.json", "kernels")
    assert record["machine"]["cpu"] and record["machine"]["packages"]["torch"] and "git_dirty" in record["machine"]
    assert record["bandwidth"][0]["bytes_per_s"] > 0
    check_kernel_rows(record["kernels"])
    assert {row["visual_tokens"] for row in record["kernels"]} == {64, 96}  # whole windows
    longer = {row["contender"] for row in record["kernels"] if row["visual_tokens"] == 96}
    assert not any("QuantizedCache" in name for name in longer)  # stock_up_to
    text = (tmp_path / "attention.md").read_text()
    assert "synthetic" in text.splitlines()[0] and "| SDPA as transformers calls it | bfloat16 |" in text
    assert (tmp_path / "attention.png").stat().st_size > 1000


def test_a_context_that_is_too_large_is_left_out_and_named(call: Run, tmp_path: Path) -> None:
    assert call("kernels", *KERNELS, "kernels.mixes=[int4]", "kernels.max_bytes=14000", "name=kernels_small") == 0
    record = load(tmp_path / "kernels_small.json", "kernels")
    assert {row["visual_tokens"] for row in record["kernels"] if "skipped" not in row} == {64}
    assert "Left out: tiny, 1 x 96 visual tokens" in (tmp_path / "attention_small.md").read_text()


def test_decode_writes_a_record_tables_and_figures(call: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "EPISODES", 1)
    overhead.main(tmp_path / "overhead_before.json")
    assert call("decode", *DECODE) == 0
    record = load(tmp_path / "decode.json", "decode")
    rows = record["decode"]
    assert {row["section"] for row in rows} == {"cache_size", "batch", "alpha", "table8", "table9"}
    for row in rows:
        assert row["tokens_per_s"] == row["batch"] / row["seconds"]["median"]
        assert row["kv_bytes"] == sum(row["kv_breakdown"].values())
    full = next(row for row in rows if row["section"] == "batch" and row["contender"] == "dynamic")
    assert full["kv_bytes"] == 2 * 2 * 2 * 2 * 8 * (8 + 256 + 24) * 2  # layers, K and V, rows, heads, D, T, bfloat16
    ours = next(row for row in rows if row["section"] == "batch" and row["contender"] == "windowquant")
    assert sum(ours["bits"].values()) == pytest.approx(1) and 0 < ours["kv_ratio_16_bit"] < 1
    assert {row["part"] for row in record["overhead"]} == {"ours", "ours without kernel", "DynamicCache"}
    notes = (tmp_path / "decoding.md").read_text()
    assert "Decode loop, ours without kernel: " in notes and "At commit" in notes  # the record of an earlier version
    assert [row["shape"] for row in record["packing"]] == ["tiny", "tiny"]
    assert [row["pack"]["n"] for row in record["packing"]] == [2, 3]
    assert {row["search"] for row in record["search"]} >= {"window", "token"}
    table8, table9 = (json.loads((tmp_path / f"table{n}.json").read_text()) for n in (8, 9))
    assert [row["contender"] for row in table8["rows"]] == [
        "dynamic", "no_first", "random_plan", "no_reorder", "windowquant",
    ]  # fmt: skip
    assert [row["setting"] for row in table9["rows"]] == ["fused", "unfused"] and table9["paper"][0]["setting"]
    assert "random weights" in table8["title"] and "random weights" in table9["title"]
    for name in ("figure2", "figure13a", "memory_by_batch"):
        assert (tmp_path / f"{name}.png").stat().st_size > 1000


def test_the_gpu_benchmark_takes_the_same_path_on_another_device() -> None:
    sections = gpu_sections(composed("bench_gpu", [*KERNELS, *DECODE, "kernels.dtypes=[float32]"]), torch.device("cpu"))
    assert {"bandwidth", "kernels", "decode", "attention", "packing", "search", "overhead"} == set(sections)
    assert all("skipped" not in row for row in sections["decode"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_the_gpu_benchmark_without_a_gpu_says_so(call: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert call("gpu") == 2
    complaint = capfd.readouterr().err.strip()
    assert complaint.startswith("There is no CUDA device here: run make bench-gpu on a machine with one")
    assert len(complaint.splitlines()) == 1 and list(tmp_path.rglob("*.json")) == []


@pytest.mark.parametrize(
    ("kind", "word", "sentence"),
    [
        ("kernels", "kernels.shapes=[gpt]", "There is no model shape 'gpt': the known ones are llava_onevision_0_5b"),
        ("kernels", "kernels.mixes=[int3]", "There is no mix of bit-widths 'int3'"),
        ("kernels", "kernels.contexts=[8]", "contexts must name numbers of visual tokens, 32"),
        ("kernels", "kernels.dtypes=[float32,int8]", "dtype is 'int8'; use one of float32, bfloat16, float16."),
        ("kernels", "kernels.dtypes=[]", "dtypes is empty; give a list"),
        ("kernels", "kernels.threads=[]", "threads is []"),
        ("kernels", "kernels.rounds=0", "rounds is 0; give a whole number, 1 or more."),
        ("kernels", "kernels.rouns=1", "rouns"),
        ("kernels", "kernels.backend=cuda", "There is no attention backend 'cuda'"),
        ("decode", "decode.shape=gpt", "There is no model shape 'gpt'"),
        ("decode", "decode.sections.batch.contenders=[lru]", "There is no contender 'lru': use one of dynamic"),
        ("decode", "decode.sections.batch.batches=[0]", "A section needs contenders"),
        ("decode", "decode.steps=none", "steps is 'none'"),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence_and_exit_code_2(
    call: Run, kind: str, word: str, sentence: str, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = KERNELS if kind == "kernels" else DECODE
    assert call(kind, *[known for known in words if known.split("=")[0] != word.split("=")[0]], word) == 2
    complaint = capfd.readouterr().err.strip()
    assert sentence in complaint and len(complaint.splitlines()) == 1
    assert list(tmp_path.rglob("*.json")) == []


def test_reports_want_a_record_of_their_kind(call: Run, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="kernels.json is not a record of the kernels benchmark: run it again"):
        build_reports(tmp_path, "kernels", "kernels")
    (tmp_path / "kernels.json").write_text('{"schema": 1, "kind": "decode"}')
    with pytest.raises(UserError, match="is not a record of the kernels benchmark"):
        build_reports(tmp_path, "kernels", "kernels")
