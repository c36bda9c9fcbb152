"""Weights & Biases: one run per record, offline unless asked otherwise, and never in the way of a measurement."""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict
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


def log(records: Iterable[RunRecord], wandb: Mapping[str, Any], output: Path, group: str | None = None) -> None:
    """Log each record as one run of the project `wandb.project`, under `<output>/runs/wandb`.

    Whatever goes wrong (no network, not logged in, no space) is said on stderr; the records are on disk already.
    """
    if wandb["mode"] == "disabled":
        return
    folder = output / "runs"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        for record in records:
            _log_one(record, wandb, folder, group)
    except Exception as error:
        print(f"Weights & Biases: {error}; the run records are complete without it.", file=sys.stderr)


def _log_one(record: RunRecord, wandb: Mapping[str, Any], folder: Path, group: str | None) -> None:
    import wandb as client

    run = client.init(
        project=wandb["project"],
        mode=wandb["mode"],
        dir=str(folder),
        name=f"{record.method}-{record.task}-{record.protocol}",
        group=group,
        config={**record.config, "fingerprint": record.fingerprint},
        settings=client.Settings(silent=True, quiet=True, console="off", init_timeout=30, x_disable_stats=True),
        reinit="finish_previous",
    )
    run.log(numbers(record))
    run.summary["record"] = {k: v for k, v in asdict(record).items() if k not in ("config", "errors")}
    run.finish()
