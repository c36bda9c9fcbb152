"""Layer sensitivities and channel statistics of a checkpoint, measured on a benchmark's own prompts."""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from windowquant.calibrate.everything import calibrate_all
from windowquant.calibration import FILE_NAME
from windowquant.harness import environment
from windowquant.harness.benchmarks import benchmark, build_task, check_videos
from windowquant.harness.data import Data, open_data
from windowquant.harness.engine import Engine
from windowquant.harness.loading import Loaded, folder_of, load
from windowquant.harness.settings import DataSettings, ModelSettings, check_count, group_settings, resolve_device
from windowquant.method import get_method


def calibrate_command(cfg: DictConfig) -> None:
    """Calibrate `model` on the first `samples` videos of `task` and write its files; prints where they are.

    Raises:
        UserError: bad input; no file is written.
    """
    plain: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
    check_count("samples", plain["samples"])
    settings = group_settings(ModelSettings, "model", plain["model"])
    data = open_data(group_settings(DataSettings, "data", plain["data"]))
    loaded = load(settings, resolve_device(plain["device"]))
    for path in calibrate(loaded, data, plain["task"]["name"], plain["samples"], settings.calibration):
        print(path)


def calibrate(loaded: Loaded, data: Data, task: str, samples: int, path: str | None = None) -> tuple[Path, Path]:
    """Measure s_l of each layer (paper, equation 9), and the statistics of its queries, keys and values.

    Samples are the first question of each of the first `samples` videos. Sensitivities are saved to `path`, by default
    beside the checkpoint, and the statistics beside them; returns both paths.
    """
    environment.prepare(data.root)
    built, column = build_task(task, data), benchmark(task).column
    first = {row[column]: index for index, row in reversed(list(enumerate(built.eval_docs_no_media)))}
    rows = built.eval_docs_no_media.select(sorted(first.values())[:samples])
    check_videos(task, data, rows)
    with get_method("fp16").bind(loaded.model, loaded.processor) as bound:
        engine = Engine(loaded, bound, "context")
        inputs = [engine.processed(built.doc_to_messages(row)) for row in rows]
    return calibrate_all(loaded.model, inputs, path or Path(folder_of(loaded.checkpoint)) / FILE_NAME)
