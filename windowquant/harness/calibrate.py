"""Layer sensitivities of a checkpoint, measured on a benchmark's own prompts."""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from windowquant.calibration import FILE_NAME, calibrate_sensitivity
from windowquant.harness import environment
from windowquant.harness.benchmarks import benchmark, build_task, check_videos
from windowquant.harness.data import Data, open_data
from windowquant.harness.engine import Engine
from windowquant.harness.loading import Loaded, folder_of, load
from windowquant.harness.settings import DataSettings, ModelSettings, check_count, group_settings, resolve_device
from windowquant.method import get_method


def calibrate_command(cfg: DictConfig) -> None:
    """Calibrate `model` on the first `samples` videos of `task` and write its file; prints where it is.

    Raises:
        UserError: bad input; no file is written.
    """
    plain: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
    check_count("samples", plain["samples"])
    settings = group_settings(ModelSettings, "model", plain["model"])
    data = open_data(group_settings(DataSettings, "data", plain["data"]))
    loaded = load(settings, resolve_device(plain["device"]))
    path = calibrate(loaded, data, plain["task"]["name"], plain["samples"], settings.calibration)
    print(path)


def calibrate(loaded: Loaded, data: Data, task: str, samples: int, path: str | None = None) -> Path:
    """Measure s_l of each layer (paper, equation 9) and save it to `path`, by default beside the checkpoint.

    Samples are the first question of each of the first `samples` videos.
    """
    environment.prepare(data.root)
    built, column = build_task(task, data), benchmark(task).column
    first = {row[column]: index for index, row in reversed(list(enumerate(built.eval_docs_no_media)))}
    rows = built.eval_docs_no_media.select(sorted(first.values())[:samples])
    check_videos(task, data, rows)
    device, dtype = loaded.model.device, loaded.model.dtype
    with get_method("fp16").bind(loaded.model, loaded.processor) as bound:
        engine = Engine(loaded, bound, "context")
        inputs = [engine.processed(built.doc_to_messages(row)) for row in rows]
    target = Path(path) if path else Path(folder_of(loaded.checkpoint)) / FILE_NAME
    target.parent.mkdir(parents=True, exist_ok=True)
    samples_on_device = (each.to(device, dtype) for each in tqdm(inputs, "calibrating"))
    calibrate_sensitivity(loaded.model, samples_on_device).save(target)
    return target
