"""The benchmarks as lmms-eval tasks: its own where it has them, pointed at the data source, ours where it has not."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import lmms_eval
from lmms_eval.api.task import ConfigurableMessagesTask
from lmms_eval.utils import load_yaml_config

from windowquant.errors import UserError
from windowquant.harness.data import Data
from windowquant.harness.lmms_model import FAILED

_STOCK = Path(lmms_eval.__file__).parent / "tasks"
_OWN = Path(__file__).parent / "tasks"


@dataclass(frozen=True)
class Benchmark:
    """One benchmark.

    task: its name here. yaml: lmms-eval's task file. kind: `choice` (an option letter) or `share` (0 to 1 a document).
    videos: folder below the data root; column: which column of the table names the file there, without suffix.
    downloads: rough size in GB of what lmms-eval fetches from the hub, None where the hub has no copy it can use.
    """

    task: str
    yaml: Path
    kind: Literal["choice", "share"]
    videos: str
    column: str
    downloads: float | None = None


BENCHMARKS = {
    b.task: b
    for b in (
        Benchmark("nextqa", _STOCK / "nextqa/nextqa_mc_test.yaml", "choice", "nextqa/NExTVideo", "video", 6.5),
        Benchmark(
            "egoschema", _STOCK / "egoschema/egoschema_subset.yaml", "choice", "egoschema/videos", "video_idx", 105
        ),
        Benchmark("intentqa", _OWN / "intentqa/intentqa.yaml", "choice", "intentqa/Videos", "video_id"),
        Benchmark("describe", _OWN / "describe/describe.yaml", "share", "describe/videos", "video"),
    )
}


def benchmark(task: str) -> Benchmark:
    """The benchmark called `task`; UserError, listing the known ones, where there is none."""
    if task not in BENCHMARKS:
        raise UserError(f"Unknown task '{task}': the known ones are {', '.join(BENCHMARKS)}.")
    return BENCHMARKS[task]


class CountedTask(ConfigurableMessagesTask):
    """A task that leaves out of its score the documents whose video could not be read."""

    def process_results(self, doc: dict[str, Any], results: list[Any], full_docs: Any = None) -> dict[str, Any]:
        """lmms-eval's scores of one document; none for a failed one."""
        return {} if results == [FAILED] else super().process_results(doc, results, full_docs)

    @property
    def metric(self) -> str:
        """Name of the benchmark's main metric."""
        return str(self.config.metric_list[0]["metric"])


@lru_cache(maxsize=8)
def build_task(task: str, data: Data) -> CountedTask:
    """The lmms-eval task, reading the data source; kept for the next run in this process.

    `environment.prepare` must have been called with the same data source.
    """
    config = load_yaml_config(str(benchmark(task).yaml), mode="full")
    table = data.table(task)
    if table is not None:
        config |= {"dataset_path": str(table), "dataset_kwargs": {"load_from_disk": True}}
    elif benchmark(task).downloads is None:
        raise UserError(f"The hub has no copy of {task} that lmms-eval can read: use data=local data.root=<folder>.")
    try:
        return CountedTask(config=config, model_name="windowquant")
    except Exception as error:  # whatever made lmms-eval give up after its retries
        attempt = getattr(error, "last_attempt", None)
        reason = " ".join(str(attempt.exception() if attempt else error).split())
        raise UserError(
            f"The data of {task} cannot be loaded ({reason}): check {table or 'network and login'}."
        ) from error


def check_videos(task: str, data: Data, rows: Sequence[dict[str, Any]]) -> None:
    """Every video of `rows` must be there before anything runs.

    Videos that lmms-eval downloads are looked for where it puts them, below `HF_HOME` (`environment.prepare` sets it).

    Raises:
        UserError: the folder, or a video, is missing; the sentence names it.
    """
    spec = benchmark(task)
    folder = (data.root or Path(os.environ["HF_HOME"])) / spec.videos
    if not folder.is_dir():
        raise UserError(f"Video folder {folder} does not exist: put the videos there or choose another folder.")
    names = sorted({str(row[spec.column]) for row in rows})
    missing = [n for n in names if not any((folder / f"{n}.{suffix}").is_file() for suffix in ("mp4", "MP4"))]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise UserError(f"Video {folder / missing[0]}.mp4 is missing{more}: put it there or choose another folder.")
