"""The decode step of fixed shapes: what it answers, that it can be compiled whole, and that it can be replayed."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from transformers import Cache, PreTrainedModel

from tests.architectures import batch_inputs
from tests.generation.common import EXACT, NAMES, WHAT, WHY, WINDOWQUANT, asked, generate, loaded
from tests.generation.replay import Recorder
from windowquant.bound import Bound
from windowquant.cache.packed_cache import PackedCache
from windowquant.errors import UserError
from windowquant.method import get_method
from windowquant.static_step import StaticStep

STEPS = 10
METHODS = (EXACT, WINDOWQUANT, {**WINDOWQUANT, "reorder": False, "backend": "reference"}, {"name": "no_video"})


def padded(name: str, seed: int = 0) -> dict[str, Any]:
    return batch_inputs(name, loaded(name)[1], seed)[0]


def run(model: PreTrainedModel, inputs: dict[str, Any], cache: Cache) -> Tensor:
    """Run the prompt; the first token of each row, [B, 1]."""
    return generate(model, inputs, cache, max_new_tokens=1).sequences[:, -1:]


def steps(step: StaticStep, tokens: Tensor, count: int = STEPS) -> tuple[Tensor, list[Tensor]]:
    """Greedy tokens [B, 1 + count], the first included, and the logits of each step."""
    found, logits = [tokens], []
    for _ in range(count):
        logits.append(step(found[-1]))
        found.append(logits[-1].argmax(-1, keepdim=True))
    return torch.cat(found, 1), logits


def assert_same(got: tuple[Tensor, list[Tensor]], want: Any, prompt: int) -> None:
    """Against what `generate` answered in one go: the tokens, and the logits but for rounding."""
    assert torch.equal(got[0], want.sequences[:, prompt:])
    for x, y in zip(got[1], want.logits[1:], strict=True):
        torch.testing.assert_close(x, y, atol=1e-3, rtol=1e-3)


def expected(bound: Bound, inputs: dict[str, Any], count: int = STEPS) -> Any:
    return generate(bound.model, inputs, bound.new_cache(inputs), max_new_tokens=1 + count)


@pytest.mark.parametrize("method", METHODS, ids=["fp16", "windowquant", "in place", "no_video"])
@pytest.mark.parametrize("name", NAMES)
def test_same_tokens_as_generate_and_the_cache_goes_on(name: str, method: dict[str, Any]) -> None:
    model, inputs = loaded(name)[0], padded(name)
    length = inputs["input_ids"].shape[1]
    with get_method(**method).bind(model) as bound:
        cache = bound.new_cache(inputs)
        tokens = run(model, inputs, cache)
        got = steps(bound.static_step(cache, STEPS + 3), tokens)
        assert_same(got, expected(bound, inputs), length)
        assert isinstance(cache, PackedCache) and cache.get_seq_length() == length + STEPS
        more = torch.cat([inputs["input_ids"], got[0]], 1)
        mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 1 + STEPS), value=1)
        on = generate(model, {"input_ids": more, "attention_mask": mask}, cache, max_new_tokens=4)
        assert torch.equal(on.sequences, expected(bound, inputs, STEPS + 4).sequences)


def test_several_rows_a_prompt_and_further_questions() -> None:
    name = "qwen2_vl"
    model, inputs = loaded(name)[0], asked(name)
    with get_method(**WINDOWQUANT).bind(model) as bound:
        cache = bound.encode(inputs)
        for question in (WHAT, WHY):
            inputs = asked(name, question)
            want = generate(model, bound.resume(cache, inputs), max_new_tokens=1 + STEPS)
            given = bound.resume(cache, inputs)
            first = generate(model, given, max_new_tokens=1).sequences[:, -1:]
            cache.batch_repeat_interleave(2)
            got, _ = steps(bound.static_step(cache, STEPS), first.repeat_interleave(2, 0))
            assert torch.equal(got, want.sequences[:, -1 - STEPS :].repeat_interleave(2, 0))


@pytest.mark.parametrize("method", [EXACT, WINDOWQUANT], ids=lambda method: method["name"])
@pytest.mark.parametrize("name", ["llava_onevision", "qwen2_vl"])
def test_one_graph_serves_all_steps(name: str, method: dict[str, Any]) -> None:
    torch.compiler.reset()
    model, counter = loaded(name)[0], CompileCounter()
    with get_method(**method).bind(model) as bound:
        for inputs in (padded(name), asked(name, WHY), padded(name, 3), padded(name, 4)):
            cache, before = bound.new_cache(inputs), counter.frame_count
            tokens = run(model, inputs, cache)
            step = bound.static_step(cache, STEPS)
            step.compile(backend=counter, fullgraph=True)
            first = steps(step, tokens, 1)
            frames = counter.frame_count
            rest = steps(step, first[0][:, -1:], STEPS - 1)
            assert counter.frame_count == frames <= before + 1
            got = torch.cat([tokens, rest[0]], 1), first[1] + rest[1]
            assert_same(got, expected(bound, inputs), inputs["input_ids"].shape[1])
    assert frames == before, "another request of a shape like an earlier one compiles nothing"


@pytest.mark.parametrize("method", METHODS, ids=["fp16", "windowquant", "in place", "no_video"])
@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_step_can_be_replayed_as_a_cuda_graph_is(name: str, method: dict[str, Any]) -> None:
    model, inputs = loaded(name)[0], padded(name)
    with get_method(**method).bind(model) as bound:
        cache, recorder, length = bound.new_cache(inputs), Recorder(), inputs["input_ids"].shape[1]
        tokens = run(model, inputs, cache)
        step = bound.static_step(cache, STEPS)
        first = steps(step, tokens, 1)
        live = step._forward

        def replayed() -> Tensor:
            return recorder.replay() if recorder.calls else recorder.record(live)

        step._forward = replayed
        rest = steps(step, first[0][:, -1:], STEPS - 1)
        assert_same((torch.cat([tokens, rest[0]], 1), first[1] + rest[1]), expected(bound, inputs), length)


def test_the_recorder_finds_what_a_cuda_graph_cannot_hold() -> None:
    x = torch.zeros(1)
    with pytest.raises(AssertionError, match="waits for the device"):
        Recorder().record(lambda: x + float(x))
    grown = [torch.zeros(1)]
    recorder = Recorder()
    recorder.record(lambda: grown.append(torch.cat(grown)) or grown[-1])
    assert len(recorder.replay()) == 1, "shapes stay as they were recorded"


def test_misuse_is_told_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "llava_onevision"
    model, inputs = loaded(name)[0], asked(name)
    with get_method("kivi", group=8).bind(model) as bound:
        cache = bound.new_cache(inputs)
        run(model, inputs, cache)
        with pytest.raises(UserError, match="needs a cache of packed windows"):
            bound.static_step(cache, 4)
    with get_method(**WINDOWQUANT).bind(model) as bound:
        cache = bound.new_cache(inputs)
        with pytest.raises(UserError, match="run the prefill first"):
            bound.static_step(cache, 4)
        with pytest.raises(UserError, match="run the prefill first"):
            bound.static_step(bound.encode(inputs), 4)
        tokens = run(model, inputs, cache)
        for count in (0, 2.5, None, True):
            with pytest.raises(UserError, match=f"max_new_tokens is {count!r}; give a whole number above 0"):
                bound.static_step(cache, count)
        monkeypatch.setattr(bound, "_device", torch.device("meta"))
        with pytest.raises(UserError, match="on one device"):
            bound.static_step(cache, 2)
        monkeypatch.undo()
        step = bound.static_step(cache, 2)
        for wrong, given in (
            (tokens[0], r"\[1\] of torch.int64"),
            (tokens / 2, r"\[1, 1\] of torch.float32"),
            (5, "5"),
        ):
            with pytest.raises(UserError, match=rf"of shape \[1, 1\], one a row, not {given}"):
                step(wrong)
        step(tokens)
        other = bound.static_step(cache, 2)
        step(tokens)
        with pytest.raises(UserError, match="used up"):
            step(tokens)
        with pytest.raises(UserError, match="used elsewhere"):
            other(tokens)
        other = bound.static_step(cache, 2)
        cache.reorder_cache(torch.tensor([0]))
        with pytest.raises(UserError, match="used elsewhere"):
            other(tokens)
        other = bound.static_step(cache, 2)
    with pytest.raises(UserError, match="not bound to the model now"):
        other(tokens)


def test_a_step_with_the_triton_kernels_waits_for_nothing() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "tests.generation.triton_step"],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
