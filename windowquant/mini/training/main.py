"""The training command: a recipe from the configuration, all stages, the checkpoint."""

from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from windowquant.errors import UserError
from windowquant.mini.architectures import architecture
from windowquant.mini.training.finish import export
from windowquant.mini.training.run import Recipe, train
from windowquant.mini.training.warm_start import find_source, sha256


def _recipe(cfg: DictConfig) -> Recipe:
    try:
        recipe = OmegaConf.merge(OmegaConf.structured(Recipe), cfg.recipe)
    except OmegaConfBaseException as error:
        raise UserError(
            f"recipe: {str(error).splitlines()[0]}; its fields are {', '.join(Recipe.__annotations__)}."
        ) from error
    result = OmegaConf.to_object(recipe)
    assert isinstance(result, Recipe)
    return result


def train_command(cfg: DictConfig) -> None:
    """Trains in `cfg.folder` (resuming what is there) and writes the checkpoint to `cfg.checkpoint`."""
    recipe, kind = _recipe(cfg), architecture(cfg.architecture)
    source = None if cfg.warm_start is None else find_source(cfg.warm_start)
    torch.set_num_threads(cfg.threads)
    folder, checkpoint = Path(cfg.folder), Path(cfg.checkpoint)
    if source is not None:
        print(f"warm start: {source}, weights' sha256 {sha256(source)}")
    model = train(recipe, kind, source, folder)
    export(kind, model, folder, checkpoint)
    print(f"checkpoint: {checkpoint}")
