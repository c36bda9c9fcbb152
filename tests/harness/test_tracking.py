"""Weights & Biases: offline files, numbers, and trouble that stays trouble of its own."""

from pathlib import Path

import pytest
import wandb

from tests.records import make_record
from windowquant.harness.tracking import log, numbers


def test_numbers_are_the_records(tmp_path: Path) -> None:
    found = numbers(make_record(kl=None))
    assert found["accuracy"] == 80.0
    assert found["bits/16"] == 1.0
    assert found["decode_s/median"] == 0.2
    assert "kl" not in found
    assert all(isinstance(value, int | float) for value in found.values())


def test_offline_runs_lie_beside_the_records(tmp_path: Path) -> None:
    log([make_record(), make_record(method="no_video")], {"mode": "offline", "project": "p"}, tmp_path, "table1")
    assert len(list((tmp_path / "runs" / "wandb").glob("offline-run-*/*.wandb"))) == 2


def test_disabled_writes_nothing(tmp_path: Path) -> None:
    log([make_record()], {"mode": "disabled", "project": "p"}, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_trouble_is_told_and_goes_no_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def offline(**_: object) -> None:
        raise wandb.errors.CommError("no network")

    monkeypatch.setattr(wandb, "init", offline)
    log([make_record()], {"mode": "online", "project": "p"}, tmp_path)
    assert "Weights & Biases: no network; the run records are complete without it." in capfd.readouterr().err
