"""IntentQA's rows are NExT-QA's with another name for the video, so lmms-eval's NExT-QA code reads them."""

import os
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any
from unittest.mock import patch

from windowquant.harness.tasks.videos import video_path


@cache
def _nextqa() -> ModuleType:
    """lmms-eval's NExT-QA functions. On import they would fetch corpora for another task, and insist on HF_HOME."""
    home = {} if "HF_HOME" in os.environ else {"HF_HOME": os.path.expanduser("~/.cache/huggingface")}
    with patch("nltk.download"), patch.dict(os.environ, home):
        return import_module("lmms_eval.tasks.nextqa.utils")


def doc_to_visual(doc: dict[str, Any]) -> list[str]:
    """The path of the video: HF_HOME/intentqa/Videos/<video_id>.mp4."""
    return [video_path("intentqa/Videos", doc["video_id"])]


def doc_to_text(doc: dict[str, Any], lmms_eval_specific_kwargs: dict[str, Any] | None = None) -> str:
    """The question and its five options, a line each, between `pre_prompt` and `post_prompt`."""
    return str(_nextqa().nextqa_doc_to_text_mc(doc, lmms_eval_specific_kwargs))


def doc_to_target(doc: dict[str, Any]) -> int:
    """The index of the right option."""
    return int(_nextqa().nextqa_doc_to_target(doc))


def process_results(doc: dict[str, Any], results: list[str]) -> dict[str, bool]:
    """`exact_match`: whether the reply's letter is right (a random one where the reply names none, as in NExT-QA)."""
    scores: dict[str, bool] = _nextqa().nextqa_mc_process_results(doc, results)
    return scores
