"""The report of what each Triton kernel takes when compiled ahead of time: JSON, and a Markdown view of it."""

import hashlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import triton
from tqdm import tqdm

from windowquant import kernels
from windowquant.harness.files import write_json, write_text
from windowquant.kernels.triton_compile import CAPABILITIES, Launch, compile_launch, configs_of, name_of
from windowquant.kernels.triton_launches import launches

FOLDER = Path(__file__).resolve().parents[2] / "results" / "triton"
TITLE = "Triton kernels, compiled ahead of time"

Entry = Mapping[str, Any]


def source_hash() -> str:
    """Hash of the source of all Triton kernels and launchers; a report is of the source whose hash it carries."""
    folder = Path(kernels.__file__).parent
    texts = (path.read_bytes() for path in sorted(folder.glob("triton_*.py")))
    return hashlib.sha256(b"\0".join(texts)).hexdigest()[:16]


def _compiled(launch: Launch) -> Iterator[dict[str, Any]]:
    configs = configs_of(launch)
    for config in configs if launch.tuned else configs[:1]:
        for capability in CAPABILITIES:
            taken = compile_launch(launch, config, capability)
            yield {
                "kernel": name_of(launch.kernel),
                "shape": launch.shape,
                "warps": config.num_warps,
                "stages": config.num_stages,
                "capability": capability,
                **asdict(taken),
            }


def build(chosen: Iterable[Launch]) -> dict[str, Any]:
    """Compile `chosen` launches for all capabilities: the report. Takes seconds for each."""
    entries = [entry for launch in chosen for entry in _compiled(launch)]
    return {"title": TITLE, "triton": triton.__version__, "source": source_hash(), "entries": entries}


def to_markdown(report: Mapping[str, Any]) -> str:
    """One row for each kernel, shape and configuration; the capabilities side by side."""
    rows: dict[tuple[Any, ...], list[Entry]] = {}
    for entry in report["entries"]:
        key = tuple(entry[name] for name in ("kernel", "shape", "warps", "stages"))
        rows.setdefault(key, []).append(entry)
    heads = ["kernel", "shape", "warps", "stages"]
    heads += [f"{what}, {of}" for what in ("registers", "shared bytes", "spilled bytes") for of in _names()]
    lines = [[*map(str, key), *_cells(entries)] for key, entries in rows.items()]
    spilled = sum(entry["spilled"] > 0 for entry in report["entries"])
    return "\n".join(
        [
            f"# {report['title']}",
            "",
            f"Triton {report['triton']}; no GPU took part, so nothing here says how fast a kernel is. Registers and "
            f"spilled bytes are a thread's, shared memory a program's. {spilled} of {len(report['entries'])} compiled "
            "kernels spill registers.",
            "",
            *("| " + " | ".join(line) + " |" for line in (heads, ["---"] * len(heads), *lines)),
            "",
        ]
    )


def _names() -> list[str]:
    return [f"sm_{capability}" for capability in CAPABILITIES]


def _cells(entries: Sequence[Entry]) -> list[str]:
    by_capability = {entry["capability"]: entry for entry in entries}
    return [str(by_capability[of][what]) for what in ("registers", "shared", "spilled") for of in CAPABILITIES]


def main() -> int:
    """Write results/triton/aot.{json,md}; 1 if a kernel spills registers, else 0."""
    report = build(tqdm(list(launches()), unit="launch", file=sys.stderr))
    write_json(FOLDER / "aot.json", report)
    write_text(FOLDER / "aot.md", to_markdown(report))
    spilling = [entry for entry in report["entries"] if entry["spilled"]]
    for entry in spilling:
        print(f"{entry['kernel']} spills {entry['spilled']} bytes at {entry['shape']}.", file=sys.stderr)
    print(FOLDER / "aot.md")
    return 1 if spilling else 0
