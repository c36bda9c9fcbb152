"""What an experiment needs of the machine, said before it starts."""

from collections.abc import Sequence

import torch
from omegaconf import DictConfig
from rich.console import Console

from windowquant.errors import UserError
from windowquant.harness.benchmarks import benchmark
from windowquant.harness.settings import RunSettings


def check(scale: DictConfig, runs: Sequence[RunSettings], console: Console) -> None:
    """Print what the runs need, and stop where it is missing. Nothing to say at a scale that needs no GPU.

    Raises:
        UserError: too little GPU memory, or data that the hub does not have.
    """
    gigabytes = float(scale.needs.gpu_gb)
    if not gigabytes:
        return
    tasks = list(dict.fromkeys(run.task for run in runs))
    fetched = {task: benchmark(task).downloads for task in tasks} if scale.data == "hub" else {}
    weights = dict.fromkeys(run.model.pretrained for run in runs)
    console.print(
        f"This needs a GPU with {gigabytes:.0f} GB, the weights of {', '.join(weights)}, and "
        + (
            "downloads of about " + ", ".join(f"{size:g} GB for {task}" for task, size in fetched.items() if size)
            if fetched
            else f"videos and tables in {runs[0].data.root}"
        )
        + "."
    )
    absent = [task for task, size in fetched.items() if size is None]
    if absent:
        raise UserError(
            f"The hub has no copy of {', '.join(absent)}: put all data into a folder and add scale.data=local "
            "scale.data_root=<folder>, or leave it out with experiment.tasks=[...]."
        )
    memory = torch.cuda.get_device_properties(0).total_memory / 1e9 if torch.cuda.is_available() else 0.0
    if memory < gigabytes:
        found = f"one with {memory:.0f} GB" if memory else "none"
        raise UserError(f"scale={scale.name} needs a GPU with {gigabytes:.0f} GB, here is {found}: use scale=mini.")
