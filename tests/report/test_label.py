"""Labels: every named configuration of a method has one of its own."""

from collections import Counter

import pytest
from hydra import compose, initialize_config_dir

from windowquant.harness.command import CONF
from windowquant.report.label import label


@pytest.mark.parametrize(
    ("method", "params", "expected"),
    [
        ("fp16", {"window_size": 32}, "fp16"),
        ("windowquant", {"alpha": 2.0, "window_size": 16}, "windowquant (alpha=2, window_size=16)"),
        ("uniform", {"bits_per_code": 1, "granularity": "window_channel"}, "uniform (1 bit per window and channel)"),
        ("uniform_int2", {"bits_per_code": 2, "granularity": "window_channel"}, "uniform_int2"),
        ("kivi", {"k_bits": 2, "v_bits": 2, "group": 32}, "kivi (K2 V2, groups of 32)"),
        (
            "skvq",
            {"k_bits": 2.0, "v_bits": 1.5, "group": 16, "clips": "searched"},
            "skvq (K2 V1.5, groups of 16, clips searched)",
        ),
        ("hf_hqq", {"nbits": 4}, "hf_hqq (4 bit)"),
        ("token_level", {"importance": "attention"}, "token_level (by attention)"),
        (
            "token_level",
            {"importance": "attention", "per_head": True, "balance": True},
            "token_level (by attention, per head, balanced)",
        ),
    ],
)
def test_labels(method: str, params: dict, expected: str) -> None:
    assert label({"method": method, "params": params}) == expected


def test_no_two_configurations_are_called_alike() -> None:
    found = []
    with initialize_config_dir(str(CONF), version_base="1.3"):
        for path in sorted((CONF / "method").glob("*.yaml")):
            method = dict(compose("run", [f"method={path.stem}"]).method)
            found.append(label({"method": method.pop("name"), "params": method}))
    twice = {name for name, count in Counter(found).items() if count > 1}
    assert twice <= {"rtn (4 bit per tensor)"}  # the method's own file is one of its named forms
