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
    log([make_record()], {"mode": "offline", "project": "p"}, tmp_path)
    assert len(list((tmp_path / "runs" / "wandb").glob("offline-run-*/*.wandb"))) == 1


def test_the_records_of_a_table_are_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, logged = [], []

    class Run:
        log = logged.append

        def finish(self) -> None:
            pass

    monkeypatch.setattr(wandb, "init", lambda **kwargs: (opened.append(kwargs["name"]), Run())[1])
    records = [make_record(), make_record(method="random_plan", seed=3, accuracy=60.0)]
    log(records, {"mode": "offline", "project": "p"}, tmp_path, "table1")
    log([], {"mode": "offline", "project": "p"}, tmp_path, "table1")
    assert opened == ["table1"]
    assert logged[0]["nextqa/context/fp16/0/accuracy"] == 80.0
    assert logged[0]["nextqa/context/random_plan/3/accuracy"] == 60.0


def test_a_record_is_a_run_with_its_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []

    def trouble(**kwargs: object) -> None:
        opened.append(kwargs)
        raise RuntimeError("enough")

    monkeypatch.setattr(wandb, "init", trouble)
    record = make_record()
    log([record], {"mode": "offline", "project": "p"}, tmp_path)
    assert opened[0]["name"] == "nextqa-context-fp16-0"
    assert opened[0]["config"] == {**record.config, "fingerprint": record.fingerprint}


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
