"""Weights & Biases, offline unless asked otherwise, and never in the way of a measurement."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from windowquant.errors import UserError
from windowquant.harness.record import RunRecord

MODES = ("offline", "online", "disabled")
LOGGED = (
    "accuracy", "strict_accuracy", "n", "unparsable", "empty", "kl", "kl_se", "agreement", "avg_bits",
    "kv_bytes", "kv_predicted", "kv_fp16", "kv_ratio", "tokens_per_s", "duration_s",
)  # fmt: skip
TIMED = ("vision_s", "prefill_s", "question_s", "decode_s", "search_s", "pack_s")


def check_mode(mode: str) -> None:
    """Raise UserError, listing the known ones, for a mode that does not exist."""
    if mode not in MODES:
        raise UserError(f"wandb.mode is '{mode}': the known ones are {', '.join(MODES)}.")


def numbers(record: RunRecord) -> dict[str, float]:
    """The record's numbers under the names that W&B shows."""
    values = {name: getattr(record, name) for name in LOGGED}
    values |= {f"bits/{bits}": share for bits, share in record.bits.items()}
    values |= {f"{part}/median": getattr(record, part)["median"] for part in TIMED}
    return {name: value for name, value in values.items() if value is not None}


def log(records: Sequence[RunRecord], wandb: Mapping[str, Any], output: Path, table: str | None = None) -> None:
    """Log to the project `wandb.project`, with files under `<output>/runs/wandb`.

    A record is a run of its own, with its configuration; the records of a `table` are one run of that name (a run takes
    W&B seconds to open and close), each number under `<task>/<protocol>/<method>/<seed>/`.

    Whatever goes wrong (no network, not logged in, no space) is said on stderr; the records are on disk already.
    """
    if wandb["mode"] == "disabled" or not records:
        return
    folder = output / "runs"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        if table is not None:
            values = {f"{_place(record)}/{k}": v for record in records for k, v in numbers(record).items()}
            _log_run(table, {}, values, wandb, folder)
            return
        for record in records:
            config = {**record.config, "fingerprint": record.fingerprint}
            _log_run(_place(record).replace("/", "-"), config, numbers(record), wandb, folder)
    except Exception as error:
        print(f"Weights & Biases: {error}; the run records are complete without it.", file=sys.stderr)


def _place(record: RunRecord) -> str:
    return f"{record.task}/{record.protocol}/{record.method}/{record.seed}"


def _log_run(
    name: str, config: Mapping[str, Any], values: Mapping[str, float], wandb: Mapping[str, Any], folder: Path
) -> None:
    import wandb as client

    run = client.init(
        project=wandb["project"],
        mode=wandb["mode"],
        dir=str(folder),
        name=name,
        config=dict(config),
        settings=client.Settings(silent=True, quiet=True, console="off", init_timeout=30, x_disable_stats=True),
        reinit="finish_previous",
    )
    run.log(dict(values))
    run.finish()
