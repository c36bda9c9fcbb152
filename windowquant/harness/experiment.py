"""An experiment: which methods on which tasks, as the cells that `scripts/run.py` would run one by one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydra import compose
from omegaconf import DictConfig, OmegaConf

from windowquant.harness.runner import REFERENCE
from windowquant.harness.settings import RunSettings
from windowquant.harness.settings import from_config as settings_from


@dataclass(frozen=True)
class Experiment:
    """One table of the paper. `seeds`: methods that are run several times; `paper`: the paper's own table, or None."""

    name: str
    title: str
    protocol: str
    methods: Sequence[str]
    tasks: Sequence[str]
    seeds: Mapping[str, Sequence[int]]
    paper: str | None


def from_config(cfg: DictConfig) -> Experiment:
    """The `experiment` group of a composed configuration."""
    values: dict[str, Any] = OmegaConf.to_container(cfg.experiment, resolve=True)  # type: ignore[assignment]
    return Experiment(**values)


def plan(experiment: Experiment, cfg: DictConfig) -> list[RunSettings]:
    """Settings of every cell, task by task, FP16 first in each (the others are compared with it).

    Must be called while Hydra is initialised on `conf/`.

    Raises:
        UserError: a cell that cannot be.
    """
    tasks = [task for task in experiment.tasks if task not in cfg.scale.skip_tasks]
    methods = sorted(experiment.methods, key=lambda name: name != REFERENCE)
    return [
        settings_from(compose("run", overrides=_overrides(experiment, cfg, method, task, seed)))
        for task in tasks
        for method in methods
        for seed in experiment.seeds.get(method, [0])
    ]


def _overrides(experiment: Experiment, cfg: DictConfig, method: str, task: str, seed: int) -> list[str]:
    limit = cfg.scale.limits.get(task)
    return [
        f"model={cfg.scale.model}",
        f"data={cfg.scale.data}",
        f"method={method}",
        f"task={task}",
        f"protocol={experiment.protocol}",
        f"seed={seed}",
        f"limit={'null' if limit is None else limit}",
        f"force={str(bool(cfg.force)).lower()}",
        f"output='{cfg.output}'",
        "wandb.mode=disabled",
        *cfg.scale.overrides,
    ]
