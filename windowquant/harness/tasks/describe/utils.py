"""Prompt and score of `describe`."""

from collections.abc import Sequence
from typing import Any

from windowquant.harness.tasks.videos import video_path


def doc_to_visual(doc: dict[str, Any]) -> list[str]:
    """The path of the video: HF_HOME/describe/videos/<video>.mp4."""
    return [video_path("describe/videos", doc["video"])]


def doc_to_text(doc: dict[str, Any], lmms_eval_specific_kwargs: dict[str, Any] | None = None) -> str:
    """The prompt, which asks for the scenes in order."""
    return str(doc["question"])


def doc_to_target(doc: dict[str, Any]) -> str:
    """The scenes in order, separated by commas."""
    return str(doc["answer"])


def process_results(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """`scenes_in_order` of the reply, 0 to 1."""
    return {"scenes_in_order": scenes_in_order(results[0], doc["answer"])}


def scenes_in_order(reply: str, truth: str) -> float:
    """The share of scenes right in order, 0 to 1.

    Both texts are lists of scenes ("sea wave, lake ball"). The score is the length of their longest common subsequence
    divided by the length of the longer list: a scene counts if it is named whole and in its turn; one left out, one
    too many and one out of turn all cost.
    """
    said, right = _scenes(reply), _scenes(truth)
    longer = max(len(said), len(right))
    return _common_subsequence(said, right) / longer if longer else 0.0


def _scenes(text: str) -> list[str]:
    phrases = [" ".join(phrase.lower().split()) for phrase in text.rstrip(" .\n").split(",")]
    return [phrase for phrase in phrases if phrase]


def _common_subsequence(a: Sequence[str], b: Sequence[str]) -> int:
    best = [0] * (len(b) + 1)
    for x in a:
        diagonal = 0
        for j, y in enumerate(b, 1):
            diagonal, best[j] = best[j], diagonal + 1 if x == y else max(best[j], best[j - 1])
    return best[-1]
