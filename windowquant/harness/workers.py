"""Running many cells in a few processes, each of which keeps its model, tasks and decoded videos."""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from threading import Thread
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from windowquant.errors import UserError
from windowquant.harness.record import RunRecord
from windowquant.harness.runner import Cell, run
from windowquant.harness.settings import RunSettings

_QUIET = {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
_shared: dict[str, Any] = {}


def run_cells(cells: Sequence[Cell], workers: int, console: Console) -> list[RunRecord]:
    """Run the cells that are not finished, and return their records.

    Cells of one model, task and protocol go to the same process one after another, in the given order: the model, the
    task and the decoded videos are still there, and FP16's answers exist when the next one is compared with them.

    Raises:
        UserError: a cell's own, or a process died; finished cells are kept.
    """
    todo = [cell for cell in cells if cell.finished() is None]
    console.print(f"{len(cells)} cells, {len(cells) - len(todo)} of them finished already.")
    if not todo:
        return []
    context = get_context("spawn")
    events, stop = context.Queue(), context.Event()
    with (
        _environment(_QUIET),
        _bar(len(todo), events, console),
        ProcessPoolExecutor(min(workers, len(todo)), context, _start, (events, stop)) as pool,
    ):
        futures = [pool.submit(_run_group, group) for group in _groups(todo)]
        try:
            return [record for future in as_completed(futures) for record in future.result()]
        except BrokenProcessPool as error:
            raise UserError(
                "A worker process died, most likely for want of memory: run again with workers=1 (finished cells stay)."
            ) from error
        finally:
            stop.set()
            for future in futures:
                future.cancel()


def _groups(cells: Sequence[Cell]) -> list[list[RunSettings]]:
    """Settings by what their process can reuse, largest group first."""
    groups: dict[tuple[str, ...], list[RunSettings]] = {}
    for cell in cells:
        key = (cell.settings.model.name, cell.settings.task, cell.settings.protocol)
        groups.setdefault(key, []).append(cell.settings)
    return sorted(groups.values(), key=len, reverse=True)


def _start(events: Any, stop: Any) -> None:
    torch.set_num_threads(1)
    _shared.update(events=events, stop=stop)


def _run_group(group: Sequence[RunSettings]) -> list[RunRecord]:
    """In a worker: one cell after another, until one fails or another worker has."""
    records = []
    for settings in group:
        if _shared["stop"].is_set():
            break
        label = f"{settings.task} {settings.method}" + (f" seed {settings.seed}" if settings.seed else "")
        try:
            records.append(run(settings, partial(_tell_share, label)))
        except BaseException:
            _shared["stop"].set()
            raise
        _tell(label, None, f"{label}: {records[-1].accuracy:.1f} % in {records[-1].duration_s:.0f} s")
    return records


def _tell_share(label: str, done: int, total: int) -> None:
    _tell(label, done / total)


def _tell(label: str, share: float | None, line: str = "") -> None:
    """To the progress bar: a cell's share done, or None and a line to print when it is finished."""
    _shared["events"].put((label, share, line))


@contextmanager
def _bar(total: int, events: Any, console: Console) -> Iterator[None]:
    """Draw what the workers tell, until the block ends."""
    clock = (TimeElapsedColumn(), TimeRemainingColumn())
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), *clock)
    with Progress(*columns, console=console) as progress:
        thread = Thread(target=_draw, args=(progress, progress.add_task("starting", total=total), events), daemon=True)
        thread.start()
        try:
            yield
        finally:
            events.put(None)
            thread.join()


def _draw(progress: Progress, bar: Any, events: Any) -> None:
    finished, running = 0, dict[str, float]()
    while (event := events.get()) is not None:
        label, share, line = event
        if share is None:
            finished += 1
            running.pop(label, None)
            progress.console.print(line, highlight=False)
        else:
            running[label] = share
        progress.update(bar, completed=finished + sum(running.values()), description=", ".join(running) or "starting")


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Environment variables for the processes started in the block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
