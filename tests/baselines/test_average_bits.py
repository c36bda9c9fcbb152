"""Average bits of every method that codes: as reported, as bytes of the real storages, and by formula."""

from pathlib import Path

import pytest
from transformers.utils import is_hqq_available, is_optimum_quanto_available

from tests.conformance.cases import storage_bytes
from tests.vlm import tiny_model, video_inputs
from windowquant.calibrate.statistics import measure_statistics
from windowquant.method import get_method
from windowquant.protocols import answer

LAYERS, HEADS, D = 2, 2, 32
T = 4 * 32 + 1  # visual tokens, and nothing else in the prompt: every byte held is theirs
ELEMENTS = 2 * LAYERS * HEADS * D * T
S = 16  # tokens a window: eight whole ones, and one token outside


def windows(bits: float) -> float:
    """Bits an element where 128 tokens hold `bits` and one has 16."""
    return (128 * bits + 16) / T


def split(coded: int, bits: float) -> float:
    """The same where `coded` tokens hold `bits`."""
    return (coded * bits + (T - coded) * 16) / T


MEASURED = {"statistics": "measured"}
SKVQ = {**MEASURED, "group": 16, "window": 32, "sinks": 3}  # four clusters of the 64 channels
METHODS = [
    ("uniform_int4", {"window_size": S}, windows(4 + 32 / S)),
    ("uniform_int2", {"window_size": S}, windows(2 + 32 / S)),
    ("uniform", {"window_size": S, "bits_per_code": 1}, windows(1 + 32 / S)),
    ("rtn_int8", {"window_size": S}, windows(8 + 32 / (128 * HEADS * D))),
    ("rtn_int2", {"window_size": S}, windows(2 + 32 / (128 * HEADS * D))),
    ("rtn", {"window_size": S, "granularity": "head"}, windows(4 + 32 / (128 * D))),
    ("rtn", {"window_size": S, "granularity": "channel"}, windows(4 + 32 / 128)),
    ("rtn", {"window_size": S, "granularity": "token"}, windows(4 + 32 / D)),
    ("rtn", {"window_size": S, "granularity": "token", "zero_point": "symmetric"}, windows(4 + 16 / D)),
    ("smoothquant", {"window_size": S, **MEASURED}, windows(8 + 16 / (HEADS * D))),
    ("smoothquant_int4", {"window_size": S, **MEASURED}, windows(4 + 16 / (HEADS * D))),
    ("smoothquant_static", {"window_size": S, **MEASURED}, windows(8 + 16 / (128 * HEADS * D))),
    ("smoothquant_token", {"window_size": S}, windows(8 + 16 / (HEADS * D))),
    ("kivi", {"residual": 32}, (split(128, 3) + split(T - 32, 3)) / 2),
    ("kivi", {"k_bits": 4, "v_bits": 4, "residual": 64}, (split(128, 5) + split(T - 64, 5)) / 2),
    ("kivi", {"k_bits": 8, "v_bits": 1, "group": 16, "residual": 48}, (split(96, 10) + split(T - 48, 3)) / 2),
    ("skvq", SKVQ, split(T - 35, 2 + 16 / 16)),
    ("skvq", {**SKVQ, "fp8": False, "k_bits": 8.0, "v_bits": 4.0}, (split(T - 35, 10) + split(T - 35, 6)) / 2),
    ("skvq", {**SKVQ, "v_bits": 1.5}, (split(T - 35, 3) + split(T - 35, 8 * 13 / 64 + 1)) / 2),
    ("token_level", {"fp16_share": 0.25, "int4_share": 0.25}, (32 * 16 + 32 * 5 + 65 * 3) / T),
    (
        "token_level",
        {"fp16_share": 0.25, "int4_share": 0.0, "recent_share": 0.1, "per_head": True, "balance": True},
        (32 * 16 + 97 * 3) / T + 16 / (2 * T),  # and a factor for each channel of K
    ),
    ("hf_quanto", {"q_group_size": 32}, 4 + 64 / 32),  # float32 scales, as the model
    ("hf_hqq", {"q_group_size": 16}, 4 + 64 / 16),
    ("hf_fp8", {}, 8),
]
MISSING = {
    "hf_quanto": not is_optimum_quanto_available(),
    "hf_hqq": not is_hqq_available(),
}


@pytest.mark.parametrize(("name", "params", "expected"), METHODS, ids=[name for name, _, _ in METHODS])
def test_reported_held_and_expected_bits_are_one(name: str, params: dict, expected: float, tmp_path: Path) -> None:
    if MISSING.get(name, False):
        pytest.skip("an extra that is not installed")
    model, inputs = tiny_model(head_dim=D), video_inputs(frames=32, before=0, after=0)
    assert inputs["input_ids"].shape[1] == T
    if "statistics" in params:
        path = tmp_path / "statistics.safetensors"
        measure_statistics(model, [video_inputs(frames=4)]).save(path)
        params = {**params, "statistics": str(path)}
    with get_method(name, **params).bind(model) as bound:
        reply, session = answer(bound, inputs, "context", 1)
        held = storage_bytes(session.cache)
    assert held == reply.kv.total
    assert reply.average_bits == pytest.approx(8 * (held - reply.kv.slack) / ELEMENTS, rel=0.01)
    assert reply.average_bits == pytest.approx(expected, rel=0.01)
