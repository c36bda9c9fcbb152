"""Whole runs through lmms-eval on the tiny model: what is recorded, resumed, compared and complained about."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from tests.tiny import write_data
from windowquant.errors import UserError
from windowquant.harness import engine, runner
from windowquant.harness.fidelity import Reference, divergence
from windowquant.harness.record import RunRecord, load
from windowquant.harness.runner import Cell, run
from windowquant.harness.settings import RunSettings
from windowquant.protocols import Reply

Make = Callable[..., RunSettings]


def samples(settings: RunSettings) -> list[dict]:
    return [json.loads(line) for line in Cell(settings).path.with_suffix(".jsonl").read_text().splitlines()]


@pytest.fixture
def forbidden(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """After calling it, evaluating anything is a failure."""

    def forbid() -> None:
        monkeypatch.setattr(runner, "_run", lambda *_: pytest.fail("a finished run was run again"))

    return forbid


def test_a_run_records_what_it_did(make_settings: Make, tiny_llava: Path) -> None:
    settings = make_settings()
    record = run(settings)
    path = Cell(settings).path
    assert load(path) == record
    assert path.parent.parts[-4:] == ("runs", "tiny", "nextqa", "context")
    assert path.name == f"uniform_int2-{record.fingerprint}.json"
    assert (record.method, record.benchmark, record.metric, record.n) == (
        "uniform_int2",
        "nextqa_mc_test",
        "exact_match",
        2,
    )
    assert record.params["bits_per_code"] == 2
    assert record.visual_tokens == 33
    assert record.bits == {"2": pytest.approx(32 / 33), "16": pytest.approx(1 / 33)}
    assert 0 < record.kl_n == 2
    assert record.kl > 0
    assert record.kv_predicted + record.kv_breakdown["slack"] == pytest.approx(record.kv_bytes)
    assert sum(record.kv_breakdown.values()) == pytest.approx(record.kv_bytes)
    assert record.kv_ratio == pytest.approx(record.kv_fp16 / record.kv_bytes)
    assert record.peak_memory["rss"] > 1 << 26
    assert record.machine["packages"]["torch"] == torch.__version__.split("+")[0]
    assert record.stand_in
    assert record.errors == []
    assert all(t["median"] > 0 for t in (record.prefill_s, record.question_s, record.decode_s, record.pack_s))


def test_fp16_bytes_are_two_an_element(make_settings: Make) -> None:
    """2 layers x K and V x 2 heads x 8 channels x 2 bytes a token, of 33 visual tokens, the text and all but one answer
    token."""
    settings = make_settings(method="fp16")
    record = run(settings)
    assert record.kv_fp16 % (2 * 2 * 2 * 8 * 2) == 0
    assert record.kv_predicted == record.kv_fp16
    assert record.avg_bits == 16
    assert record.kl == record.kl_se == 0
    assert record.agreement == 100


def test_fidelity_is_measured_along_fp16s_answer(make_settings: Make) -> None:
    """Oracle: the reference file, and the method's own logits for the same tokens, computed afresh."""
    from windowquant.harness.benchmarks import build_task
    from windowquant.harness.engine import Engine
    from windowquant.harness.loading import load as load_model

    settings = make_settings()
    record = run(settings)
    reference = Cell(settings.reference())
    answers = Reference(reference.reference_path)
    loaded = load_model(settings.model, torch.device("cpu"))
    task = build_task("nextqa", reference.data)
    with Cell(settings).method.bind(loaded.model) as bound:
        engine = Engine(loaded, bound, "context", 1)
        for sample in samples(settings):
            tokens, log_probs = answers.answer(sample["doc_id"])
            answer = engine.answer(task.doc_to_messages(task.eval_docs[sample["doc_id"]]), {})
            kl, agreement = divergence(log_probs, answer.session.logits(tokens))
            assert sample["kl"] == pytest.approx(kl, abs=1e-6)
            assert sample["agreement"] == pytest.approx(agreement)
    assert record.kl == pytest.approx(sum(s["kl"] for s in samples(settings)) / 2)
    assert load(reference.path).method == "fp16"


def test_official_and_strict_score_are_both_kept(make_settings: Make) -> None:
    """Random weights answer nonsense: lmms-eval guesses, the strict score does not."""
    record = run(make_settings(limit=4))
    assert record.strict_accuracy == 0
    assert record.unparsable + record.empty == record.n == 4
    assert 0 <= record.accuracy <= 100
    assert record.ci95[0] <= record.accuracy <= record.ci95[1]


@pytest.mark.parametrize("protocol", ["paper", "cached"])
def test_other_protocols_run_too(make_settings: Make, protocol: str) -> None:
    record = run(make_settings(task="egoschema", protocol=protocol))
    assert (record.protocol, record.benchmark, record.n) == (protocol, "egoschema_subset", 2)


def test_a_finished_run_is_not_run_again(make_settings: Make, forbidden: Callable[[], None]) -> None:
    settings = make_settings()
    record = run(settings)
    forbidden()
    assert run(settings) == record
    with pytest.raises(pytest.fail.Exception):
        run(replace(settings, force=True))
    with pytest.raises(pytest.fail.Exception):
        run(replace(settings, limit=1))


def test_a_second_run_gives_the_same_numbers(make_settings: Make, tmp_path: Path) -> None:
    first, second = (
        run(
            make_settings(
                method="random_plan", params={"window_size": 8, "sensitivity": "online"}, output=str(tmp_path / d)
            )
        )
        for d in "ab"
    )
    same = ("fingerprint", "accuracy", "strict_accuracy", "kl", "agreement", "bits", "kv_bytes", "n")
    assert {k: asdict(first)[k] for k in same} == {k: asdict(second)[k] for k in same}


def test_fidelity_can_be_limited(make_settings: Make) -> None:
    record = run(make_settings(limit=3, fidelity_limit=1))
    assert (record.n, record.kl_n, record.kl_se) == (3, 1, None)


def test_progress_is_told(make_settings: Make) -> None:
    told: list[tuple[int, int]] = []
    run(make_settings(method="fp16", limit=3), lambda done, total: told.append((done, total)))
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_what_the_first_use_takes_is_in_no_measurement(make_settings: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    replies: list[Reply] = []
    real = engine.answer

    def slow_at_first(*args, **kwargs):
        reply, session = real(*args, **kwargs)
        if not replies:
            reply = replace(reply, decode_s=[1000.0] * len(reply.decode_s))
        replies.append(reply)
        return reply, session

    monkeypatch.setattr(engine, "answer", slow_at_first)
    record = run(make_settings(method="fp16", limit=3))
    assert len(replies) == record.n + 1 and replies[0].tokens == replies[1].tokens
    steps = [seconds for reply in replies[1:] for seconds in reply.decode_s]
    assert record.tokens_per_s == pytest.approx(len(steps) / sum(steps))


@pytest.fixture
def with_broken_video(tmp_path: Path) -> Path:
    root = write_data(tmp_path / "data")
    (root / "nextqa/NExTVideo/9000000001.mp4").write_bytes(b"no video")
    return root


def test_an_unreadable_video_is_recorded_and_in_no_score(
    make_settings: Make, with_broken_video: Path, forbidden: Callable[[], None]
) -> None:
    settings = make_settings(data=with_broken_video, limit=4)
    record = run(settings)
    assert record.n == 2
    assert [error["doc_id"] for error in record.errors] == [1, 3]
    assert all("9000000001.mp4 cannot be decoded" in error["reason"] for error in record.errors)
    lines = samples(settings)
    assert [line["doc_id"] for line in lines] == [0, 1, 2, 3]
    assert ["error" in line for line in lines] == [False, True, False, True]
    forbidden()
    with pytest.raises(pytest.fail.Exception):  # it is not finished: the video may have been mended
        run(settings)


def test_no_readable_video_is_no_result(make_settings: Make, with_broken_video: Path, tmp_path: Path) -> None:
    (with_broken_video / "nextqa/NExTVideo/9000000000.mp4").write_bytes(b"")
    with pytest.raises(UserError, match="No video of nextqa could be read"):
        run(make_settings(data=with_broken_video))
    assert not list((tmp_path / "results").rglob("*.json*"))


def test_bad_input_leaves_nothing_behind(make_settings: Make, tmp_path: Path) -> None:
    for changes, sentence in (
        ({"method": "fp61"}, "Unknown method"),
        ({"task": "charades"}, "Unknown task"),
        ({"data": tmp_path / "gone"}, "does not exist"),
        ({"params": {"window_size": 0}}, "window_size is 0"),
        ({"wandb": {"mode": "loud", "project": "p"}}, "wandb.mode is 'loud'"),
        ({"method": "windowquant", "params": {}}, "calibrat"),
    ):
        with pytest.raises(UserError, match=sentence):
            run(make_settings(**changes))
    assert not list((tmp_path / "results").rglob("uniform*"))
    assert not list((tmp_path / "results").rglob("windowquant*"))


def test_a_window_larger_than_the_video_is_a_warning_and_stays_fp16(make_settings: Make) -> None:
    with pytest.warns(UserWarning, match="[Ww]indow"):
        record: RunRecord = run(make_settings(params={"window_size": 64}))
    assert record.bits == {"16": 1.0}
    assert record.kl == pytest.approx(0, abs=1e-6)
