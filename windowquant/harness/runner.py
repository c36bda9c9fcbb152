"""Running one cell: resume if it is done, evaluate it through lmms-eval otherwise, and write its record."""

import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from windowquant.harness import environment, machine, record
from windowquant.harness.benchmarks import CountedTask, benchmark, build_task, check_videos
from windowquant.harness.collect import Collector
from windowquant.harness.data import open_data
from windowquant.harness.evaluate import evaluate
from windowquant.harness.fidelity import Reference, save_reference
from windowquant.harness.lmms_model import EvaluatedModel, Progress
from windowquant.harness.loading import Loaded, find, folder_of, load
from windowquant.harness.measure import bytes_per_token, fidelity, measure, spread
from windowquant.harness.methods import build_method, calibration_of
from windowquant.harness.record import RunRecord
from windowquant.harness.scores import Scores
from windowquant.harness.settings import RunSettings
from windowquant.harness.tracking import check_mode

REFERENCE = "fp16"


class Cell:
    """One run, identified: what it would evaluate and where its record lies. Making one loads no weights.

    Raises:
        UserError: something in the settings does not exist or cannot be.
    """

    def __init__(self, settings: RunSettings) -> None:
        self.settings = settings
        self.benchmark = benchmark(settings.task)
        self.method = build_method(settings.method, settings.params, settings.model.calibration)
        check_mode(settings.wandb["mode"])
        self.data = open_data(settings.data)
        self.checkpoint = find(settings.model.pretrained, settings.model.revision)
        self.data_fingerprint = self.data.fingerprint(settings.task)
        calibration = calibration_of(self.method, folder_of(self.checkpoint))
        self.config = {**settings.identity(), "params": asdict(self.method), "calibration": calibration}
        self.fingerprint = record.fingerprint(self.config, self.checkpoint.fingerprint, self.data_fingerprint)
        self.path: Path = record.record_path(settings, self.fingerprint)

    def finished(self) -> RunRecord | None:
        """The record, if this very run has been done and `force` does not ask for it again."""
        return None if self.settings.force else record.finished(self.path, self.fingerprint)

    def read(self) -> RunRecord | None:
        """Whatever record of this run there is, one with unreadable videos included."""
        return record.load(self.path) if self.path.is_file() else None

    @property
    def reference_path(self) -> Path:
        """Where the FP16 run keeps its answers for the other methods."""
        return self.path.with_suffix(".safetensors")

    @property
    def is_reference(self) -> bool:
        """Whether the other methods on the same inputs are compared with this run."""
        return self.settings.method == REFERENCE


def run(settings: RunSettings, progress: Progress | None = None) -> RunRecord:
    """Run a cell, or return its record if it is finished. The FP16 run on the same inputs is done first if missing.

    Args:
        progress: told (documents done, documents in all) after each; None draws a bar on stderr.

    Raises:
        UserError: wrong or missing input; no record is written.
    """
    cell = Cell(settings)
    return cell.finished() or _run(cell, progress)


def _run(cell: Cell, progress: Progress | None) -> RunRecord:
    started, clock = datetime.now(UTC), time.perf_counter()
    settings = cell.settings
    environment.prepare(cell.data.root)
    task = build_task(settings.task, cell.data)
    rows = task.eval_docs_no_media.select(range(min(settings.limit or len(task.eval_docs), len(task.eval_docs))))
    check_videos(settings.task, cell.data, rows)
    collector = Collector(None if cell.is_reference else _reference(cell, progress), settings.fidelity_limit)
    loaded = load(settings.model, settings.torch_device)
    peak = machine.PeakMemory(settings.torch_device)
    peak.start()
    scores = _evaluate(cell, task, loaded, collector, progress)
    result = RunRecord(
        **_identity(cell, task),
        **_scores(scores),
        errors=[{"doc_id": doc, "reason": reason} for doc, reason in sorted(collector.errors.items())],
        **fidelity(collector.divergences),
        **measure(list(collector.replies.values()), bytes_per_token(loaded.model.config), _whole_fp16(cell)),
        vision_s=spread(list(collector.vision_s.values())),
        peak_memory=peak.read(),
        machine=machine.describe(settings.torch_device),
        started=started.isoformat(timespec="seconds"),
        duration_s=time.perf_counter() - clock,
    )
    if cell.is_reference:
        save_reference(collector.answers, cell.reference_path)
    record.save(result, _samples(scores, collector), cell.path)
    return result


def _reference(cell: Cell, progress: Progress | None) -> Reference:
    """FP16's answers on the same inputs, computed now if they are not there."""
    reference = Cell(cell.settings.reference())
    if not (reference.path.is_file() and reference.reference_path.is_file()):
        _run(reference, progress)
    return Reference(reference.reference_path)


def _whole_fp16(cell: Cell) -> float | None:
    """Bytes a request that FP16 takes for the whole videos, if this method is shown fewer frames of them."""
    frames = cell.settings.model.frames
    reference = None if cell.method.frames(frames) == frames else Cell(cell.settings.reference()).read()
    return None if reference is None else reference.kv_fp16


def _evaluate(cell: Cell, task: CountedTask, loaded: Loaded, collector: Collector, progress: Progress | None) -> Scores:
    settings = cell.settings
    model = EvaluatedModel(loaded, cell.method, settings.protocol, settings.max_new_tokens, collector, progress)
    return evaluate(model, cell.benchmark, task, settings.limit, settings.seed)


def _identity(cell: Cell, task: CountedTask) -> dict[str, Any]:
    settings = cell.settings
    return {
        "schema": record.SCHEMA,
        "fingerprint": cell.fingerprint,
        "config": cell.config,
        "model": settings.model.name,
        "model_id": cell.checkpoint.source,
        "model_revision": cell.checkpoint.revision,
        "model_fingerprint": cell.checkpoint.fingerprint,
        "stand_in": settings.model.stand_in,
        "method": settings.method,
        "params": cell.config["params"],
        "task": settings.task,
        "benchmark": str(task.config.task),
        "metric": task.metric,
        "data_id": cell.data.name,
        "data_fingerprint": cell.data_fingerprint,
        "protocol": settings.protocol,
        "seed": settings.seed,
        "limit": settings.limit,
    }


def _scores(scores: Scores) -> dict[str, Any]:
    return {
        "accuracy": scores.accuracy,
        "n": scores.n,
        "ci95": scores.ci95,
        "strict_accuracy": scores.strict,
        "strict_ci95": scores.strict_ci95,
        "unparsable": scores.unparsable,
        "empty": scores.empty,
    }


def _samples(scores: Scores, collector: Collector) -> list[dict[str, Any]]:
    """One dictionary a document, failed ones included."""
    lines = []
    for sample in scores.samples:
        kl, agreement = collector.divergences.get(sample["doc_id"], (None, None))
        lines.append({**sample, "kl": kl, "agreement": agreement})
    failed = [{"doc_id": doc, "error": reason} for doc, reason in collector.errors.items()]
    return sorted(lines + failed, key=lambda line: line["doc_id"])
