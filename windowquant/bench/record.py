"""The record of one benchmark run: a JSON file with what was measured, on what, and from which source."""

import importlib.metadata as metadata
import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from windowquant.errors import UserError
from windowquant.harness import machine
from windowquant.harness.files import write_json

SCHEMA = 1
SYNTHETIC = "random weights, K and V; no trained model, no video"


def write(path: Path, kind: str, settings: dict[str, Any], device: torch.device, sections: dict[str, Any]) -> None:
    """Write a record atomically.

    kind: which benchmark. settings: what it was asked to do. sections: lists of rows by name, times in seconds (with
    median, quartiles, minimum and number), sizes in bytes.
    """
    described = machine.describe(device)
    del described["threads"]  # rows say how many they ran on
    versions = {name: _version(name) for name in ("triton", "numba", "optimum-quanto", "hqq")}
    record = {
        "schema": SCHEMA,
        "kind": kind,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "data": SYNTHETIC,
        "machine": {**described, "packages": {**described["packages"], **versions}, "cores": os.cpu_count()},
        "settings": settings,
        **sections,
    }
    write_json(path, record)


def load(path: Path, kind: str) -> dict[str, Any]:
    """Read a record of this kind; UserError if it is missing or something else."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["schema"] != SCHEMA or record["kind"] != kind:
            raise KeyError("kind")
    except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a record of the {kind} benchmark: run it again.") from error
    return record


def _version(package: str) -> str | None:
    """Installed version of a package that not every contender needs; None where it is missing."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
