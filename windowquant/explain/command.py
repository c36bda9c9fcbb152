"""What `windowquant explain` does with its arguments."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from omegaconf import DictConfig

from windowquant.explain.explanation import Explanation
from windowquant.explain.request import explain
from windowquant.explain.several import compare
from windowquant.harness.engine import Engine
from windowquant.harness.files import write_text
from windowquant.harness.loading import load
from windowquant.harness.methods import build_method
from windowquant.harness.settings import ModelSettings, RunSettings, from_config
from windowquant.harness.video import sample_frames
from windowquant.report.save import save_figure


def explain_command(
    cfg: DictConfig, checkpoint: str | None, video: Path, questions: Sequence[str], output: Path, as_json: bool
) -> None:
    """Draw the picture of one question, or that of several, and write it; prints where it is.

    cfg: a composed `conf/run.yaml`, of which task and data play no part. checkpoint: a folder or hub id in place of the
    configured model.

    Raises:
        UserError: bad input; no file is written.
    """
    settings = from_config(cfg)
    if checkpoint is not None:
        model = ModelSettings(checkpoint, checkpoint, settings.model.frames)
        settings = replace(settings, model=model)
    explanations = explained(settings, video, questions)
    figure = explanations[0].figure() if len(questions) == 1 else compare(explanations)
    save_figure(figure, output)
    print(output)
    if as_json:
        numbers = [explanation.to_dict() for explanation in explanations]
        target = output.with_suffix(".json")
        write_text(target, json.dumps({"video": str(video), "questions": numbers}, indent=1) + "\n")
        print(target)


def explained(settings: RunSettings, video: Path, questions: Sequence[str]) -> list[Explanation]:
    """One explanation a question."""
    method = build_method(settings.method, settings.params, settings.model.calibration)
    frames = sample_frames(video, settings.model.frames)
    loaded = load(settings.model, settings.torch_device)
    with method.bind(loaded.model, loaded.processor) as bound:
        engine = Engine(loaded, bound, settings.protocol)
        return [
            explain(
                bound,
                engine.inputs(_message(video, question)),
                frames,
                question=question,
                protocol=settings.protocol,
                max_new_tokens=settings.max_new_tokens or 32,
            )
            for question in questions
        ]


def _message(video: Path, question: str) -> list[dict[str, object]]:
    content = [{"type": "video", "url": str(video)}, {"type": "text", "text": question}]
    return [{"role": "user", "content": content}]
