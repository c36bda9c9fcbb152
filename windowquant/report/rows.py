"""From run records to the rows of a table."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from windowquant.harness.record import RunRecord
from windowquant.harness.settings import digest
from windowquant.method import get_method
from windowquant.report.frontier import frontier
from windowquant.report.paired import mark_paired

AVERAGED = (
    "accuracy", "strict_accuracy", "kl", "kl_se", "agreement", "avg_bits", "kv_bytes", "kv_predicted", "kv_fp16",
    "kv_ratio", "tokens_per_s",
)  # fmt: skip

Source = tuple[RunRecord, Path]


def build_rows(sources: Iterable[Source]) -> list[dict[str, Any]]:
    """One row per model, task, protocol, method and hyper-parameters; runs that differ in the seed alone are one.

    Accuracies are in percent, bytes per request, KL in nats. A row of several `runs` holds means over them, the mean
    of their intervals' bounds (the documents are the same, so more seeds do not narrow it), and as `accuracy_sd` and
    `kl_sd` the standard deviations between them. `status`: see `windowquant.method.Status`. `cache_bits`: what the
    whole cache holds per element of K and V of all its tokens (room to grow included), where FP16 has 16; `avg_bits` is
    of the visual tokens alone. `unbeaten`: see `mark_unbeaten`; `blind`: `mark_blind`; `p_fp16`: `paired.mark_paired`.

    Raises UserError for a record of a method, or of a hyper-parameter, that is not known.
    """
    groups: dict[str, list[Source]] = {}
    for record, path in sources:
        params = {name: value for name, value in record.params.items() if name != "seed"}
        key = digest([record.model, record.task, record.protocol, record.method, params])
        groups.setdefault(key, []).append((record, path))
    rows = [_row(sorted(group, key=lambda source: source[0].seed)) for group in groups.values()]
    mark_unbeaten(rows)
    mark_blind(rows)
    mark_paired(rows)
    return rows


def _row(group: Sequence[Source]) -> dict[str, Any]:
    records = [record for record, _ in group]
    first = records[0]
    means = {name: _mean([getattr(record, name) for record in records]) for name in AVERAGED}
    return {
        "model": first.model,
        "method": first.method,
        "task": first.task,
        "protocol": first.protocol,
        "accuracy": means["accuracy"],
        "n": first.n,
        "ci95": [_mean([record.ci95[side] for record in records]) for side in (0, 1)],
        "kl": means["kl"],
        "agreement": means["agreement"],
        "avg_bits": means["avg_bits"],
        "kv_bytes": means["kv_bytes"],
        "tokens_per_s": means["tokens_per_s"],
        "record": group[0][1].as_posix(),
        "status": get_method(first.method, **first.params).status,
        "cache_bits": 16 * mean(record.kv_bytes / record.kv_fp16 for record in records),
        "unbeaten": False,
        **{name: means[name] for name in ("strict_accuracy", "kl_se", "kv_predicted", "kv_fp16", "kv_ratio")},
        "unparsable": sum(record.unparsable for record in records),
        "empty": sum(record.empty for record in records),
        "errors": sum(len(record.errors) for record in records),
        "runs": len(records),
        "accuracy_sd": _sd([record.accuracy for record in records]),
        "kl_sd": _sd([record.kl for record in records]),
        "params": {name: value for name, value in first.params.items() if name != "seed"},
        "records": [path.as_posix() for _, path in group],
        "blind": None,
    }


def mark_unbeaten(rows: Sequence[dict[str, Any]]) -> None:
    """Set `unbeaten` on each row than which no other one of its model, task and protocol is better at equal memory: as
    accurate with fewer KV bytes, or more accurate with as many at most."""
    settings: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        settings.setdefault(_setting(row), []).append(row)
    for group in settings.values():
        best = {(row["kv_bytes"], row["accuracy"]) for row in frontier(group, "kv_bytes")}
        for row in group:
            row["unbeaten"] = (row["kv_bytes"], row["accuracy"]) in best


def mark_blind(rows: Sequence[dict[str, Any]]) -> None:
    """Set `blind` on each row whose model, task and protocol have both controls.

    True where dropping the video costs nothing: `no_video` reaches the lower bound of FP16's 95 % interval, so the
    accuracies of that task under that protocol say nothing about the cache.
    """
    controls: dict[tuple[str, ...], dict[str, dict[str, Any]]] = {}
    for row in rows:
        controls.setdefault(_setting(row), {})[row["method"]] = row
    for row in rows:
        found = controls[_setting(row)]
        if "fp16" in found and "no_video" in found:
            row["blind"] = found["no_video"]["accuracy"] >= found["fp16"]["ci95"][0]


def _setting(row: dict[str, Any]) -> tuple[str, ...]:
    return row["model"], row["task"], row["protocol"]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return mean(known) if known else None


def _sd(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return stdev(known) if len(known) > 1 else None
