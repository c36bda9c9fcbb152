"""Which methods and architectures the conformance suite goes over. A new method joins by one line in `CASES`."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Cache
from transformers.utils import is_hqq_available, is_optimum_quanto_available

from tests.architectures import build, video_inputs
from windowquant.calibrate.statistics import measure_statistics
from windowquant.method import Method, get_method

ARCHITECTURES = ("llava_onevision", "qwen2_vl", "qwen3_vl", "internvl")
_INSTALLED = {"hf_quanto": is_optimum_quanto_available(), "hf_hqq": is_hqq_available()}


@dataclass(frozen=True)
class Case:
    """A method, in sizes that suit models of two layers, two KV heads and eight channels.

    exact: whether nothing is lost at all. alone: whether a request is answered in a batch as it is alone. recent: of n
    columns, of which the first p are the prompt, how many of the newest tokens must be exact. held: of n tokens, bits
    an element (mean of K and V) that the one at a position takes by the published formula, scales included; None where
    text is in 16 bit and the video's bytes are the rest. refusal: why default options do not suit these models, if so.
    """

    name: str
    params: dict[str, Any] = field(default_factory=dict)
    exact: bool = False
    alone: bool = True
    recent: Callable[[int, int], int] = lambda n, p: n - p
    held: Callable[[int, int], float] | None = None
    refusal: str = ""

    def method(self, architecture: str, folder: Path) -> Method:
        """The method, calibrated for this architecture where it must be."""
        params = dict(self.params)
        if params.get("statistics") == "measured":
            params["statistics"] = str(statistics_of(architecture, folder))
        return get_method(self.name, **params)

    @property
    def id(self) -> str:
        return "-".join(
            [self.name, *(str(v) for k, v in self.params.items() if k in ("zero_point", "granularity", "importance"))]
        )


W = {"window_size": 4}
PLANNED = {**W, "sensitivity": (0.45, 0.6)}
MEASURED = {"statistics": "measured"}
SKVQ = {"group": 8, "window": 8, "sinks": 2}
NO_STATISTICS, NO_SENSITIVITY = "There is no statistics file", "There is no windowquant_calibration.json"


def _kivi(position: int, n: int) -> float:
    """2 bits and 32 / 8 for scale and minimum of a group of 8; K is coded in blocks of 16, V but for the newest 16."""
    coded = (position < n - n % 16, position < n - 16)
    return sum(2 + 32 / 8 if each else 16 for each in coded) / 2


def _skvq(position: int, n: int) -> float:
    """2 bits and 2 x 8 for each of 2 clusters of the 16 channels, but for 2 sinks and the newest 8."""
    return 2 + 2 * 2 * 8 / 16 if 2 <= position < n - 8 else 16


def _residual(n: int, p: int) -> int:
    """Of transformers' QuantizedCache: what came since the last 128."""
    return (n - p) % 128


CASES = [
    Case("dynamic", exact=True),
    Case("fp16", {"kv_dtype": "model"}, exact=True),
    Case("fewer_frames", {"kv_dtype": "model"}, exact=True),
    Case("no_video"),
    Case("no_span"),
    Case("windowquant", PLANNED, alone=False, refusal=NO_SENSITIVITY),  # its requests vote
    Case("random_plan", PLANNED, alone=False, refusal=NO_SENSITIVITY),
    Case("token_level", {"importance": "similarity"}, alone=False),
    Case("token_level", {"importance": "attention"}, alone=False),
    Case("uniform_int4", W),
    Case("rtn_int8", W),
    Case("rtn_int4", W),
    Case("rtn_int2", W),
    Case("rtn", {**W, "zero_point": "symmetric", "granularity": "token_all"}),
    Case("smoothquant", {**W, **MEASURED}, refusal=NO_STATISTICS),
    Case("smoothquant_int4", {**W, **MEASURED}, refusal=NO_STATISTICS),
    Case("smoothquant_static", {**W, **MEASURED}, refusal=NO_STATISTICS),
    Case("smoothquant_token", W),
    Case("kivi", {"group": 8, "residual": 16}, recent=lambda n, p: n % 16, held=_kivi, refusal="head_dim 8"),
    Case("skvq", {**SKVQ, **MEASURED}, recent=lambda n, p: 8, held=_skvq, refusal=NO_STATISTICS),
    Case("hf_quanto", {"q_group_size": 8}, recent=_residual),
    Case("hf_hqq", {"q_group_size": 4}, recent=_residual),
    Case("hf_fp8", alone=False, recent=lambda n, p: 0),  # one scale for the whole batch, nothing exact
]
every_method = pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, id=c.id, marks=pytest.mark.skipif(not _INSTALLED.get(c.name, True), reason="not installed"))
        for c in CASES
    ],
)
every_architecture = pytest.mark.parametrize("architecture", ARCHITECTURES)

loaded = cache(build)


@cache
def statistics_of(architecture: str, folder: Path) -> Path:
    """File of an architecture's channel statistics, measured once."""
    model, processor = loaded(architecture)
    path = folder / f"{architecture}.safetensors"
    measure_statistics(model, [video_inputs(architecture, processor, seed) for seed in (11, 12)]).save(path)
    return path


def generate(model: Any, inputs: dict[str, Any], keyword: str = "", held: Cache | None = None, **options: Any) -> Any:
    """`generate`, greedy and of 6 tokens unless said otherwise, with its logits and scores."""
    own = {} if held is None else {keyword: held}
    settings = {
        "max_new_tokens": 6,
        "do_sample": False,
        "output_logits": True,
        "output_scores": True,
        "return_dict_in_generate": True,
    }
    return model.generate(**inputs, **own, **{**settings, **options})


def tensors_in(thing: Any, seen: set[int]) -> list[torch.Tensor]:
    """Every tensor reachable through attributes and containers of a cache's own objects, subclasses opened up."""
    if id(thing) in seen:
        return []
    seen.add(id(thing))
    if hasattr(thing, "__tensor_flatten__"):
        children = [getattr(thing, name) for name in thing.__tensor_flatten__()[0]]
    elif isinstance(thing, torch.Tensor):
        return [thing]
    elif isinstance(thing, dict):
        children = list(thing.values())
    elif isinstance(thing, list | tuple | set):
        children = list(thing)
    elif type(thing).__module__.startswith(("windowquant.cache", "windowquant.core", "transformers.cache")):
        # what the layers of a cache share: the prompt, the plan, codecs; no K and no V
        shared = ("_request", "request", "planner", "_rotation", "codec", "quantizer", "rotation")
        children = [value for key, value in vars(thing).items() if key not in shared]
    else:
        children = []
    return [tensor for child in children for tensor in tensors_in(child, seen)]


def storage_bytes(cache: Any) -> int:
    """Bytes of all storages that hold a cache's tensors."""
    storages = [tensor.untyped_storage() for tensor in tensors_in(cache, set())]
    # without empty ones, which may have the address of another
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}.values())
