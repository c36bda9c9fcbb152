"""After the last stage: sensitivities measured on training stories, and the checkpoint folder."""

import json
from collections.abc import Iterator
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np
from transformers import PreTrainedModel, ProcessorMixin

from windowquant.calibrate.everything import calibrate_all
from windowquant.calibration import FILE_NAME
from windowquant.mini import scenes as sc
from windowquant.mini.architectures import Architecture
from windowquant.mini.render import Drawings, frames

CALIBRATION_SAMPLES = 8


def _samples(architecture: Architecture, processor: ProcessorMixin, count: int) -> Iterator[dict[str, Any]]:
    """Prompts about videos of training stories with training drawings: nothing that an evaluation asks."""
    for seed in range(count):
        rng = np.random.default_rng([77, seed])
        story = sc.sample_story(rng)
        text = sc.prompt(sc.ask(sc.NEXTQA_MIX, story, rng), "nextqa")
        turn = [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": text}]}]
        prompt = processor.apply_chat_template(turn, add_generation_prompt=True)
        video = architecture.sampled(frames(story, Drawings(False), seed))
        yield processor(text=[prompt], videos=[video], return_tensors="pt")


def export(architecture: Architecture, model: PreTrainedModel, training: Path, folder: Path) -> None:
    """Writes what `from_pretrained` reads, its calibration, and the training's log; whole or not at all."""
    partial = folder.with_name(folder.name + ".partial")
    rmtree(partial, ignore_errors=True)
    processor = architecture.build_processor(architecture.build_tokenizer())
    model.save_pretrained(partial)
    processor.save_pretrained(partial)
    calibrate_all(model, _samples(architecture, processor, CALIBRATION_SAMPLES), partial / FILE_NAME)
    lines = [json.loads(line) for line in (training / "log.jsonl").read_text().splitlines()]
    (partial / "training_log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rmtree(folder, ignore_errors=True)
    partial.rename(folder)
