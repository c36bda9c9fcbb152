"""Parts of the benchmarks: mixes, interleaving, the unfused path, targets."""

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.build import Shape, build, causal, plain_attention, queries, relative_error
from windowquant.bench import decode, unfused
from windowquant.bench.contenders import Cell, flash_and_flex, sdpa
from windowquant.bench.decode import spec
from windowquant.bench.shapes import MIXES, TEXT, mixed_bits, text_shape
from windowquant.bench.synthetic import ids_of, random_model, sharing, stand_in_sensitivity
from windowquant.bench.timing import interleaved, summary, threads
from windowquant.errors import UserError
from windowquant.report.bench_targets import Target, decode_targets, kernel_targets


@given(windows=st.integers(1, 700), name=st.sampled_from(sorted(MIXES)))
def test_a_mix_has_its_shares_to_within_two_windows(windows: int, name: str) -> None:
    bits = mixed_bits(windows, name)
    assert len(bits) == windows and bits[0] == max(MIXES[name])
    counts = Counter(bits)
    assert set(counts) <= set(MIXES[name])
    assert all(abs(counts[width] - share * windows) <= 2 for width, share in MIXES[name].items())


def test_every_round_runs_every_step_once_beginning_with_another() -> None:
    calls: list[str] = []
    times = interleaved({name: lambda name=name: calls.append(name) for name in "abc"}, rounds=3, warm=1)
    assert calls == ["a", "b", "c", "a", "b", "c", "b", "c", "a", "c", "a", "b"]
    assert {name: len(values) for name, values in times.items()} == {"a": 3, "b": 3, "c": 3}


def test_a_spent_budget_ends_after_three_rounds() -> None:
    assert len(interleaved({"a": lambda: None}, rounds=50, clock=lambda _: 1.0, budget_s=0.0)["a"]) == 3


def test_a_summary_is_of_quartiles() -> None:
    assert summary([4.0, 1.0, 2.0, 3.0, 5.0]) == {"median": 3.0, "q25": 2.0, "q75": 4.0, "min": 1.0, "n": 5}


def test_threads_are_put_back() -> None:
    before = torch.get_num_threads()
    with threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("shape", [Shape(), Shape(batch=2, heads=2, group=7, channels=64, window=8)])
def test_the_unfused_path_is_attention(shape: Shape) -> None:
    case, q = build(shape, (4, 2, 16, 8, 2)), queries(shape, 1)
    expected = plain_attention(q, case, causal(1, case.k.shape[2]), 0.2)
    assert relative_error(unfused.attend(q, case.layer, None, 0.2), expected) < 2e-3


def test_the_unfused_path_refuses_what_it_cannot_take() -> None:
    case = build(Shape(), (4, 2))
    with pytest.raises(UserError, match="give one query token a request, and no mask"):
        unfused.attend(queries(Shape(), 2), case.layer, None, 1.0)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_unquantized_contenders_read_all_of_k_and_v_and_flex_attention_takes_their_shapes() -> None:
    cell = Cell(text_shape("tiny"), 64, 32, 1, torch.float32, torch.device("cpu"))
    assert [contender.needed_bytes for contender in sdpa(cell, torch.float32)] == [2 * 4 * 2 * 8 * 96] * 2
    flash, flex = flash_and_flex(cell, torch.float32)
    flex.step()
    assert flash.name == "flash attention" and flex.needed_bytes == 2 * 4 * 2 * 8 * 96


def test_shapes_have_the_heads_of_their_models() -> None:
    heads = {name: (shape.heads, shape.kv_heads, shape.channels) for name, shape in TEXT.items()}
    assert heads["llava_onevision_0_5b"] == (14, 2, 64)
    assert heads["llava_onevision_7b"] == heads["qwen2_vl_7b"] == (28, 4, 128)
    assert heads["llava_1_5_7b"] == (32, 32, 128)


def test_models_that_share_parameters_take_no_memory_and_say_the_same() -> None:
    torch.manual_seed(0)
    model = random_model(text_shape("tiny"), torch.float32, torch.device("cpu"))
    second: Any = sharing(model)
    assert all(a is b for a, b in zip(model.parameters(), second.parameters(), strict=True))
    ids = ids_of(1, 0)
    assert torch.equal(model(input_ids=ids).logits, second(input_ids=ids).logits)
    second.config.text_config._attn_implementation = "eager"
    assert model.config.text_config._attn_implementation != "eager"


def test_sensitivities_are_stretched_between_the_ends() -> None:
    four, seven = stand_in_sensitivity(4), stand_in_sensitivity(7)
    assert (seven[0], seven[2], seven[4], seven[6]) == pytest.approx(four)
    assert seven[1] == pytest.approx((four[0] + four[1]) / 2)


def test_contenders_by_alpha() -> None:
    assert spec("windowquant alpha=0.5").params == {"alpha": 0.5}
    for name in ("windowquant alpha=x", "dynamic alpha=1", "nobody"):
        with pytest.raises(UserError, match="There is no contender"):
            spec(name)


def _row(contender: str, ms: float, dtype: str = "float32", tokens: int = 16384, count: int = 2) -> dict[str, Any]:
    return {
        "shape": "llava_onevision_7b", "visual_tokens": tokens, "threads": count, "contender": contender,
        "dtype": dtype, "seconds": {"median": ms / 1e3},
    }  # fmt: skip


def test_targets_of_attention_are_ratios_of_medians() -> None:
    rows = [
        _row("windowquant paper", 2.0),
        _row("windowquant paper", 3.0, count=1),
        _row("windowquant paper", 8.4, tokens=65536),
        _row("windowquant paper, step", 2.5),
        _row("windowquant paper", 1.5, "bfloat16"),
        _row("SDPA as transformers calls it", 30.0, "bfloat16"),
        _row("SDPA as transformers calls it", 7.0),
        _row("QuantizedCache hf_quanto, step", 50.0),
        {"shape": "llava_onevision_7b", "visual_tokens": 131072, "skipped": "too large"},
    ]
    found = {(t.what, t.threads): (round(t.value, 3), t.reached) for t in kernel_targets({"kernels": rows})}
    assert found == {
        ("attention: SDPA as transformers calls it, bfloat16, over ours", 2): (20.0, True),
        ("attention: SDPA as transformers calls it, float32, over ours", 2): (3.5, False),
        ("step: QuantizedCache (quanto INT4) over ours", 2): (20.0, True),
        ("attention, float32: time of 65,536 tokens over four times that of 16,384", 2): (1.05, True),
        ("attention, float32: time of 1 thread over that of 2", 2): (1.5, False),
    }


def test_targets_of_decoding_want_little_memory_and_much_speed() -> None:
    common = {"visual_tokens": 19600, "batch": 1, "threads": 2}
    rows = [
        {**common, "contender": "dynamic", "seconds": {"median": 0.3}, "kv_bytes": 100, "kv_ratio_16_bit": 1.0},
        {**common, "contender": "windowquant", "seconds": {"median": 0.1}, "kv_bytes": 31, "kv_ratio_16_bit": 0.31},
    ]
    packing = [{"shape": "mini", "visual_tokens": 384, "threads": 1, "pack_of_prefill": 0.04}]
    found = list(decode_targets({"decode": rows, "packing": packing}))
    assert [(round(target.value, 3), target.reached) for target in found] == [
        (3.0, True), (0.31, False), (0.31, False), (0.04, True),
    ]  # fmt: skip
    assert not Target("x", 1, 1.0, 1.1, most=True).reached
    assert "DynamicCache with" not in found[0].what
    few = {**rows[0], "visual_tokens": 980, "seconds": {"median": 0.2}}
    limited = next(decode_targets({"decode": [few, *rows], "packing": packing}))
    assert (
        limited.what.endswith("19,600 visual tokens (DynamicCache with 980: 1.50)") and limited.value == found[0].value
    )


def test_contenders_without_room_beside_others_are_measured_after_them(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"dynamic": [None], "windowquant": ["full", None], "hf_quanto": ["full", "full"]}
    monkeypatch.setattr(decode._Cell, "_too_large", lambda cell, contender: answers[contender.name].pop(0))
    together: list[list[str]] = []

    def recorded(steps: dict[str, Any], *args: Any) -> dict[str, list[float]]:
        together.append(list(steps))
        return interleaved(steps, *args)

    monkeypatch.setattr(decode, "interleaved", recorded)
    section = decode.Section(["dynamic", "windowquant", "hf_quanto"], [1], [64])
    settings = decode.DecodeSettings("tiny", torch.float32, {"batch": section}, [1], "reference", 1, 1.0)
    model = random_model(text_shape("tiny"), torch.float32, torch.device("cpu"))
    rows = decode.measure_decode(settings, model, torch.device("cpu"), lambda cell: None)
    assert together == [["dynamic"], ["windowquant"]] and all(left == [] for left in answers.values())
    assert [(row["contender"], row.get("skipped")) for row in rows] == [
        ("dynamic", None), ("windowquant", None), ("hf_quanto", "full"),
    ]  # fmt: skip
