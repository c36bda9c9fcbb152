"""One optimisation loop for all stages: AdamW, one-cycle learning rate, a log line now and then, and a state on disk
from which it resumes."""

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from windowquant.errors import UserError

# (progress 0..1, random generator of this step) -> loss
LossFn = Callable[[float, np.random.Generator], Tensor]


@dataclass(frozen=True)
class Stage:
    """What a stage is called, how long it runs, how often it reports and saves."""

    name: str
    steps: int
    learning_rate: float
    seed: int
    report_every: int = 100
    save_every: int = 200
    warm_up: float = 0.05
    weight_decay: float = 0.05


def _learning_rate(stage: Stage, step: int) -> float:
    """Linear warm-up, then a cosine down to a hundredth."""
    progress = step / stage.steps
    if progress < stage.warm_up:
        return stage.learning_rate * (0.04 + 0.96 * progress / stage.warm_up)
    fall = (progress - stage.warm_up) / (1 - stage.warm_up)
    return stage.learning_rate * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * fall)))


def _save_state(path: Path, step: int, params: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    tensors = {f"param.{name}": p.detach() for name, p in params.items()}
    for name, p in params.items():
        for key in ("exp_avg", "exp_avg_sq"):
            tensors[f"{key}.{name}"] = optimizer.state[p].get(key, torch.zeros_like(p))
    partial = path.with_suffix(".partial")
    save_file({k: v.contiguous() for k, v in tensors.items()}, partial, metadata={"step": str(step)})
    partial.replace(path)


def _load_state(path: Path, params: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> int:
    with safe_open(path, framework="pt") as f:
        step = int(f.metadata()["step"])
    tensors = load_file(path)
    shapes = {name: tensors[f"param.{name}"].shape for name in params if f"param.{name}" in tensors}
    if shapes != {name: p.shape for name, p in params.items()}:
        raise UserError(f"{path} is of another model; train in another folder, or remove it.")
    with torch.no_grad():
        for name, p in params.items():
            p.copy_(tensors[f"param.{name}"])
            moments = {key: tensors[f"{key}.{name}"] for key in ("exp_avg", "exp_avg_sq")}
            optimizer.state[p] = {"step": torch.tensor(float(step)), **moments}
    return step


def fit(
    stage: Stage,
    params: Mapping[str, nn.Parameter],
    loss_fn: LossFn,
    report: Callable[[], Mapping[str, float]],
    folder: Path,
) -> None:
    """Runs the stage in place; a finished or interrupted stage found in the folder is loaded and continued.

    Every step draws from its own generator, seeded by (seed, stage, step), so that a resumed run sees what an
    unbroken one would have.
    """
    state, log = folder / f"{stage.name}.safetensors", folder / "log.jsonl"
    optimizer = torch.optim.AdamW(
        params.values(), lr=stage.learning_rate, weight_decay=stage.weight_decay, betas=(0.9, 0.98)
    )
    done = _load_state(state, params, optimizer) if state.exists() else 0
    start, mean = time.time(), None
    for step in range(done + 1, stage.steps + 1):
        rng = np.random.default_rng([stage.seed, *stage.name.encode(), step])
        torch.manual_seed(int(rng.integers(2**31)))
        for group in optimizer.param_groups:
            group["lr"] = _learning_rate(stage, step)
        loss = loss_fn(step / stage.steps, rng)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(params.values(), 1.0)
        optimizer.step()
        mean = loss.item() if mean is None else 0.98 * mean + 0.02 * loss.item()
        if step % stage.report_every == 0 or step == stage.steps:
            line = {"stage": stage.name, "step": step, "loss": round(mean, 4), "seconds": round(time.time() - start)}
            line |= {k: round(v, 4) for k, v in report().items()}
            print(json.dumps(line), flush=True)
            with log.open("a") as f:
                f.write(json.dumps(line) + "\n")
        if step % stage.save_every == 0 or step == stage.steps:
            _save_state(state, step, params, optimizer)
