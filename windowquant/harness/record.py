"""The record of one run: a JSON file with everything measured and everything needed to measure it again."""

import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from windowquant.errors import UserError
from windowquant.harness.files import write_json, write_text
from windowquant.harness.machine import package_versions
from windowquant.harness.settings import RunSettings, digest

SCHEMA = 3


@dataclass(frozen=True)
class RunRecord:
    """One run. Accuracies are percentages, times seconds, sizes bytes (mean per request unless said otherwise).

    `accuracy` is the benchmark's own metric as lmms-eval computes it; `strict_accuracy` counts answers that cannot be
    read, and empty ones, as wrong. `ci95` is Wilson's interval for choices, a seeded bootstrap for shares. Documents
    whose video cannot be read are in `errors`, in neither score, and not in `n`. `kl` is the mean over documents of
    the mean over FP16's answer tokens of KL(FP16 || method), `kl_se` its standard error; both and `agreement` (percent)
    are None where no reference exists. `alpha` is what the requests' plans were made with (chosen for each of them if
    the method has a target of bits), None for a method without thresholds. `vision_s` is the vision tower's time for a
    video, `prefill_s` is without it. `kv_fp16` is what the same tokens take in 16 bits; for a method that is shown
    fewer frames, what FP16 takes for all of them.
    """

    schema: int
    fingerprint: str
    config: dict[str, Any]
    model: str
    model_id: str
    model_revision: str | None
    model_fingerprint: str
    stand_in: bool
    method: str
    params: dict[str, Any]
    task: str
    benchmark: str
    metric: str
    data_id: str
    data_fingerprint: str
    protocol: str
    seed: int
    limit: int | None
    accuracy: float
    n: int
    ci95: tuple[float, float]
    strict_accuracy: float
    strict_ci95: tuple[float, float]
    unparsable: int
    empty: int
    errors: list[dict[str, Any]]
    kl: float | None
    kl_se: float | None
    kl_n: int
    agreement: float | None
    alpha: dict[str, float] | None
    bits: dict[str, float]
    avg_bits: float
    visual_tokens: float
    kv_bytes: float
    kv_breakdown: dict[str, float]
    kv_predicted: float
    kv_fp16: float
    kv_ratio: float
    peak_memory: dict[str, int | None]
    vision_s: dict[str, float]
    prefill_s: dict[str, float]
    question_s: dict[str, float]
    decode_s: dict[str, float]
    search_s: dict[str, float]
    pack_s: dict[str, float]
    tokens_per_s: float | None
    machine: dict[str, Any]
    started: str
    duration_s: float


def fingerprint(config: dict[str, Any], model: str, data: str) -> str:
    """Identity of a run: configuration, fingerprints of model and data, and this package's version."""
    version = package_versions()["windowquant"]
    return digest({"schema": SCHEMA, "config": config, "model": model, "data": data, "version": version})


def record_path(settings: RunSettings, run: str) -> Path:
    """`<output>/runs/<model>/<task>/<protocol>/<method>-<fingerprint>.json`."""
    folder = Path(settings.output) / "runs" / settings.model.name / settings.task / settings.protocol
    return folder / f"{settings.method}-{run}.json"


def save(record: RunRecord, samples: list[dict[str, Any]], path: Path) -> None:
    """Write the samples (`.jsonl`, one document a line), then the record; the record is what marks a run finished."""
    lines = "".join(json.dumps(_finite(sample), ensure_ascii=False) + "\n" for sample in samples)
    write_text(path.with_suffix(".jsonl"), lines)
    write_json(path, _finite(asdict(record)))


def load(path: Path) -> RunRecord:
    """Read a record.

    Raises:
        UserError: no such file, or not a record of this schema.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values["schema"] != SCHEMA or set(values) != {f.name for f in fields(RunRecord)}:
            raise KeyError("schema")
        values |= {name: tuple(values[name]) for name in ("ci95", "strict_ci95")}
        return RunRecord(**values)
    except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a run record of schema {SCHEMA}: delete it and run again.") from error


def finished(path: Path, run: str) -> RunRecord | None:
    """The record at `path` if it is that of `run` and complete; a run that met unreadable videos is done again."""
    if not path.is_file():
        return None
    try:
        record = load(path)
    except UserError:
        return None
    return record if record.fingerprint == run and not record.errors else None


def _finite(value: Any) -> Any:
    """JSON has no infinities: they become None."""
    if isinstance(value, dict):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
