"""Records: written whole or not at all, read back, and recognised."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.records import make_record
from windowquant.errors import UserError
from windowquant.harness.files import write_atomically
from windowquant.harness.record import fingerprint, finished, load, save


def test_a_record_comes_back_as_it_was(tmp_path: Path) -> None:
    record, path = (
        make_record(kl=None, errors=[{"doc_id": 3, "reason": "Video x has no frames."}]),
        tmp_path / "a/b.json",
    )
    save(record, [{"doc_id": 0, "text": "ä (B)", "kl": float("inf")}], path)
    assert load(path) == record
    assert json.loads(path.with_suffix(".jsonl").read_text()) == {"doc_id": 0, "text": "ä (B)", "kl": None}
    assert sorted(p.name for p in path.parent.iterdir()) == ["b.json", "b.jsonl"]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"schema": 99}'])
def test_anything_else_is_no_record(tmp_path: Path, text: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"r\.json is not a run record"):
        load(path)
    assert finished(path, "f") is None


def test_only_a_clean_record_of_the_same_run_is_finished(tmp_path: Path) -> None:
    path, record = tmp_path / "r.json", make_record()
    assert finished(path, record.fingerprint) is None
    save(record, [], path)
    assert finished(path, record.fingerprint) == record
    assert finished(path, "another") is None
    save(replace(record, errors=[{"doc_id": 0, "reason": "gone"}]), [], path)
    assert finished(path, record.fingerprint) is None


def test_fingerprint_depends_on_each_part() -> None:
    base = fingerprint({"limit": 1}, "model", "data")
    assert base == fingerprint({"limit": 1}, "model", "data")
    others = [({"limit": 2}, "model", "data"), ({"limit": 1}, "other", "data"), ({"limit": 1}, "model", "other")]
    assert len({base, *(fingerprint(*other) for other in others)}) == 4


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "kept.txt"
    path.write_text("old")

    def broken(temporary: Path) -> None:
        temporary.write_text("half")
        raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        write_atomically(path, broken)
    assert [p.name for p in tmp_path.iterdir()] == ["kept.txt"]
    assert path.read_text() == "old"
