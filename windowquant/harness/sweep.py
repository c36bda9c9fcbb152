"""What a Hydra multirun ends in: one table and one figure of the records that it made."""

import sys
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from windowquant.harness.record import RunRecord, load
from windowquant.harness.runner import REFERENCE, Cell
from windowquant.harness.settings import RunSettings
from windowquant.report import figure, table

POINTER = "records.txt"


def in_multirun() -> bool:
    """Whether this is one job of a multirun."""
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def leave_pointer(settings: RunSettings) -> None:
    """Name this job's record, and that of its FP16 reference, where the end of the multirun will look for it."""
    paths = [Cell(settings).path, Cell(settings.reference()).path]
    folder = Path(HydraConfig.get().runtime.output_dir)
    (folder / POINTER).write_text("\n".join(str(path) for path in paths) + "\n")


def report(config: DictConfig) -> None:
    """Write `<output>/tables/<name>.*` and `<output>/figures/<name>.png` from the records that the jobs point to.

    Exit code 2 if a video was unreadable.
    """
    pointers = sorted(Path(config.hydra.sweep.dir).glob(f"*/{POINTER}"))
    paths = dict.fromkeys(line for pointer in pointers for line in pointer.read_text().splitlines())
    sources = [(load(Path(path)), Path(path)) for path in paths if Path(path).is_file()]
    if not sources:
        return
    output = Path(config.output)
    name = config.sweep_name or "sweep_" + "_".join(sorted({record.task for record, _ in sources}))
    built = table.build("Sweep", sorted(sources, key=_order))
    table.write(built, output / "tables", name)
    figure.sweep_figure(built.title, built.rows, output / "figures" / f"{name}.png")
    table.show(built, table.wide_console())
    print(f"{output / 'tables' / name}.md, {output / 'figures' / name}.png")
    complaint = errors_sentence([record for record, _ in sources])
    if complaint:
        print(complaint, file=sys.stderr)
        raise SystemExit(2)


def _order(source: table.Source) -> tuple[Any, ...]:
    """FP16 first in its task, then by method and hyper-parameters."""
    record, _ = source
    numbers = [value for value in record.params.values() if isinstance(value, int | float)]
    return record.task, record.method != REFERENCE, record.method, numbers


def errors_sentence(records: list[RunRecord]) -> str | None:
    """One sentence naming the videos that could not be read, None if all could."""
    reasons = list(dict.fromkeys(error["reason"] for record in records for error in record.errors))
    if not reasons:
        return None
    count = sum(len(record.errors) for record in records)
    return f"Not scored, for want of a readable video: {count} of the documents. {' '.join(reasons)}"
