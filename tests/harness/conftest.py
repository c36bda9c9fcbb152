"""Settings of runs on the tiny model and data."""

from collections.abc import Callable
from pathlib import Path

import pytest

from windowquant.harness.settings import DataSettings, ModelSettings, RunSettings

FRAMES = 8
Make = Callable[..., RunSettings]


@pytest.fixture
def make_settings(tiny_llava: Path, tiny_data: Path, tmp_path: Path) -> Make:
    """Factory of settings: `make_settings(method="uniform_int2", task="egoschema", ...)`."""

    def make(method: str = "uniform_int2", data: Path = tiny_data, **changes: object) -> RunSettings:
        values: dict = {
            "model": ModelSettings("tiny", str(tiny_llava), FRAMES, stand_in=True),
            "method": method,
            "params": {} if method == "fp16" else {"window_size": 8},
            "task": "nextqa",
            "data": DataSettings("local", str(data)),
            "limit": 2,
            "max_new_tokens": 4,
            "output": str(tmp_path / "results"),
            "device": "cpu",
        }
        return RunSettings(**{**values, **changes})

    return make
