"""One run, validated: what a composed configuration asks for."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, TypeVar, get_args

import torch
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from windowquant.errors import UserError
from windowquant.protocols import Protocol

T = TypeVar("T")
PROTOCOLS: tuple[Protocol, ...] = get_args(Protocol)


@dataclass(frozen=True)
class ModelSettings:
    """Which checkpoint, and how it sees a video.

    `pretrained` is a local folder, a hub id, or the name of an embedded checkpoint; `frames` are taken per video;
    `window_size` is what methods take by default.
    `max_pixels` is the most that a frame may have where the model keeps a video's own resolution, None for the
    checkpoint's own limit.
    `calibration` is the file of its layer sensitivities, None for the one beside the checkpoint.
    """

    name: str
    pretrained: str
    frames: int
    revision: str | None = None
    dtype: str = "auto"
    trust_remote_code: bool = False
    window_size: int = 32
    stand_in: bool = False
    calibration: str | None = None
    max_pixels: int | None = None


@dataclass(frozen=True)
class DataSettings:
    """`name`: mini (embedded, generated), hub (downloaded by lmms-eval) or local (a folder, `root`)."""

    name: str
    root: str | None = None


@dataclass(frozen=True)
class RunSettings:
    """One cell: a model with one method on one task under one protocol."""

    model: ModelSettings
    method: str
    params: Mapping[str, Any]
    task: str
    data: DataSettings
    protocol: Protocol = "context"
    limit: int | None = None
    seed: int = 0
    max_new_tokens: int | None = None
    fidelity_limit: int | None = None
    device: str = "auto"
    force: bool = False
    output: str = "results"
    wandb: Mapping[str, Any] = field(default_factory=lambda: {"mode": "disabled", "project": "windowquant"})

    def __post_init__(self) -> None:
        check_protocol(self.protocol)
        check_count("limit", self.limit)
        check_count("max_new_tokens", self.max_new_tokens)
        check_count("fidelity_limit", self.fidelity_limit)
        check_count("model.frames", self.model.frames)
        check_count("model.max_pixels", self.model.max_pixels)

    @property
    def torch_device(self) -> torch.device:
        return resolve_device(self.device)

    def identity(self) -> dict[str, Any]:
        """Everything here that decides the numbers: not where results go, nor where model and data happen to lie."""
        kept = asdict(self)
        for name in ("data", "force", "output", "wandb", "device"):
            del kept[name]
        for name in ("pretrained", "calibration", "window_size"):  # the last is in the method's parameters
            del kept["model"][name]
        return {**kept, "params": dict(self.params), "data": self.data.name, "device": self.torch_device.type}

    def reference(self) -> "RunSettings":
        """The FP16 run on the same inputs, against which this one's fidelity is measured."""
        params = {"window_size": self.model.window_size}  # as composed, so that both are one run
        return replace(self, method="fp16", params=params, seed=0, force=False)


def check_protocol(name: str) -> None:
    """Raise UserError, listing the known ones, for a protocol that does not exist."""
    if name not in PROTOCOLS:
        raise UserError(f"Unknown protocol '{name}': the known ones are {', '.join(PROTOCOLS)}.")


def resolve_device(name: str) -> torch.device:
    """The device asked for; `auto` is the GPU where there is one. Raises UserError for one that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"device is {name}, but no CUDA device is available: use device=cpu or device=auto.")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise UserError(f"device is '{name}', which torch does not know: use auto, cpu or cuda.") from error


def check_count(name: str, value: Any) -> None:
    """Raise UserError unless `value` is None or a whole number of at least 1."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise UserError(f"{name} is {value}: give a whole number of at least 1, or null for no limit.")


def from_config(cfg: DictConfig) -> RunSettings:
    """Settings from a composed Hydra configuration (`conf/run.yaml`).

    Raises:
        UserError: a value is missing, of the wrong type or out of range; the sentence names the field.
    """
    missing = sorted(OmegaConf.missing_keys(cfg))
    if missing:
        raise UserError(f"{missing[0]} is not set: add {missing[0]}=<value> to the command.")
    try:
        plain: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
    except OmegaConfBaseException as error:
        raise UserError(f"Configuration: {str(error).splitlines()[0]}.") from error
    method, task = plain["method"], plain["task"]
    return RunSettings(
        model=group_settings(ModelSettings, "model", plain["model"]),
        method=method["name"],
        params={name: value for name, value in method.items() if name != "name"},
        task=task["name"],
        max_new_tokens=task["max_new_tokens"],
        data=group_settings(DataSettings, "data", plain["data"]),
        protocol=plain["protocol"]["name"],
        **{name: plain[name] for name in ("limit", "seed", "fidelity_limit", "device", "force", "output", "wandb")},
    )


def group_settings(kind: type[T], group: str, values: dict[str, Any]) -> T:
    """A settings dataclass from a group's values; UserError for one it does not have."""
    known = [f.name for f in fields(kind)]  # type: ignore[arg-type]
    unknown = [name for name in values if name not in known]
    if unknown:
        raise UserError(f"{group} has no setting '{unknown[0]}': it has {', '.join(known)}.")
    return kind(**values)


def digest(value: Any) -> str:
    """SHA-256 of a JSON value in canonical form, 16 hexadecimal digits."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]
