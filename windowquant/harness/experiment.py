"""An experiment: which models and methods on which tasks, as the cells that `scripts/run.py` would run one by one."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydra import compose
from omegaconf import DictConfig, OmegaConf

from windowquant.errors import UserError
from windowquant.harness.runner import REFERENCE
from windowquant.harness.settings import RunSettings
from windowquant.harness.settings import from_config as settings_from


@dataclass(frozen=True)
class Experiment:
    """One table. `models`: "all" that the scale names, its "first", or a list of them; `seeds`: methods that are run
    several times; `paper`: the paper's own table, or None."""

    name: str
    title: str
    models: str | Sequence[str]
    protocols: Sequence[str]
    methods: Sequence[str]
    tasks: Sequence[str]
    seeds: Mapping[str, Sequence[int]]
    paper: str | None


def from_config(cfg: DictConfig) -> Experiment:
    """The `experiment` group of a composed configuration."""
    values: dict[str, Any] = OmegaConf.to_container(cfg.experiment, resolve=True)  # type: ignore[assignment]
    return Experiment(**values)


def plan(experiment: Experiment, cfg: DictConfig) -> list[RunSettings]:
    """Settings of every cell, model by model and task by task, FP16 first in each (the others are compared with it).

    Must be called while Hydra is initialised on `conf/`.

    Raises:
        UserError: a cell that cannot be.
    """
    tasks = {
        name: compose("run", [f"task={name}"]).task for name in experiment.tasks if name not in cfg.scale.skip_tasks
    }
    methods = sorted(experiment.methods, key=lambda name: name != REFERENCE)
    models = _models(experiment, list(cfg.scale.models))
    bases = {
        (model, method, protocol): compose("run", _overrides(cfg, model, method, protocol))
        for model in models
        for method in methods
        for protocol in experiment.protocols
    }
    return [
        _cell(bases[model, method, protocol], tasks[task], cfg.scale.limits.get(task), seed)
        for model in models
        for task in tasks
        for protocol in experiment.protocols
        for method in methods
        for seed in experiment.seeds.get(method, [0])
    ]


def _models(experiment: Experiment, known: list[str]) -> list[str]:
    """Names of the models, which must be the scale's."""
    if experiment.models == "all":
        return known
    if experiment.models == "first":
        return known[:1]
    asked = [experiment.models] if isinstance(experiment.models, str) else list(experiment.models)
    for name in asked:
        if name not in known:
            raise UserError(f"experiment.models has '{name}': use all, first, or a list out of {', '.join(known)}.")
    return asked


def _cell(base: DictConfig, task: DictConfig, limit: int | None, seed: int) -> RunSettings:
    """Settings of one cell. Composing takes Hydra far longer than these three assignments."""
    cell = copy.deepcopy(base)
    cell.task, cell.limit, cell.seed = task, limit, seed
    return settings_from(cell)


def _overrides(cfg: DictConfig, model: str, method: str, protocol: str) -> list[str]:
    scale = cfg.scale
    located = {"model.pretrained": scale.models[model], "data.root": scale.data_root}
    return [
        f"model={model}",
        f"data={scale.data}",
        f"method={method}",
        f"protocol={protocol}",
        f"force={str(bool(cfg.force)).lower()}",
        f"output='{cfg.output}'",
        "wandb.mode=disabled",
        *(f"{field}='{place}'" for field, place in located.items() if place is not None),
        *scale.overrides,
    ]
