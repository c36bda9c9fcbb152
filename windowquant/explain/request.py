"""From a bound method and one request to its explanation."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from windowquant.bound import Bound
from windowquant.cache.packed_cache import PackedCache, RequestStats
from windowquant.core.thresholds import thresholds
from windowquant.errors import UserError
from windowquant.explain.explanation import Explanation
from windowquant.harness.measure import bytes_per_token
from windowquant.models import Prompt
from windowquant.protocols import Protocol, answer
from windowquant.window_method import WindowMethod

_SIDE = 192  # pixels of the longer side of a kept frame
_MINI = Path(__file__).resolve().parents[1] / "mini" / "checkpoints"


def explain(
    bound: Bound,
    inputs: Mapping[str, Any],
    frames: Sequence[Any] | np.ndarray | None = None,
    *,
    question: str | None = None,
    protocol: Protocol = "context",
    max_new_tokens: int = 32,
    stop_ids: Iterable[int] | None = None,
) -> Explanation:
    """Answer one request and tell what the method did to it.

    inputs, protocol, max_new_tokens, stop_ids: see `windowquant.answer`. frames: the frames or images that the model
    was shown, in order (uint8 [H, W, 3] arrays or PIL images), for the picture. question: its words, by default all
    text of the prompt after the last visual token. Text is decoded with the processor that the method was bound with.

    Raises UserError for a prompt without visual tokens, and for what `answer` refuses.
    """
    pictures = bound.adapter.pictures(bound.model, inputs)[0]
    if not pictures:
        raise UserError("The prompt holds no visual tokens, so there is nothing to explain; add an image or a video.")
    reply, session = answer(bound, inputs, protocol, max_new_tokens, stop_ids)
    method, stats = bound.method, session.cache.stats if isinstance(session.cache, PackedCache) else None
    scores = None if stats is None or stats.scores is None else tuple(stats.scores[0].tolist())
    name, stand_in = _identity(bound)
    own = method if isinstance(method, WindowMethod) else WindowMethod  # the usual windows, where none are cut
    return Explanation(
        model=name,
        stand_in=stand_in,
        method_name=method.name,
        method=method.described(),
        protocol=protocol,
        question=_after_video(bound, session.prompt) if question is None else question,
        answer=_text(bound, reply.tokens),
        window_size=own.window_size,
        picture_tokens=tuple(len(picture.columns) for picture in pictures),
        scores=scores,
        sensitivity=None if stats is None or scores is None else stats.sensitivity,
        thresholds=None if stats is None else _thresholds(stats),
        widths=tuple(getattr(method, "widths", ())),
        plan=reply.plan,
        drops_visual=own.drops_visual,
        bits=reply.bits,
        average_bits=reply.average_bits,
        kv=reply.kv,
        fp16_bytes=bytes_per_token(bound.model.config) * (reply.prompt_tokens + len(reply.tokens) - 1),
        frames=None if frames is None else tuple(_reduced(frame) for frame in frames),
    )


def _thresholds(stats: RequestStats) -> tuple[tuple[float, float], ...] | None:
    if stats.plan is None or stats.plan.alpha is None:
        return None
    low, high = thresholds(stats.sensitivity, stats.plan.alpha)
    return tuple(zip(low.tolist(), high.tolist(), strict=True))


def _identity(bound: Bound) -> tuple[str, bool]:
    """What to call the model, and whether it is one that the package carries."""
    place = str(getattr(bound.model.config, "_name_or_path", "") or bound.model.config.model_type)
    folder = Path(place)
    if folder.resolve().is_relative_to(_MINI):
        return f"mini_{folder.name}", True
    return (folder.name if folder.is_dir() else place), False


def _after_video(bound: Bound, prompt: Prompt) -> str:
    columns = torch.arange(prompt.visual_end, prompt.length)
    return _text(bound, prompt.input_ids[0, columns].tolist())


def _text(bound: Bound, tokens: Sequence[int]) -> str:
    """Tokens as text, or their ids where the method was bound without a processor."""
    tokenizer = getattr(bound.processor, "tokenizer", bound.processor)
    if tokenizer is None:
        return " ".join(map(str, tokens))
    return str(tokenizer.decode(list(tokens), skip_special_tokens=True)).strip()  # type: ignore[attr-defined]


def _reduced(frame: Any) -> np.ndarray:
    image = Image.fromarray(np.asarray(frame, dtype=np.uint8)).convert("RGB")
    image.thumbnail((_SIDE, _SIDE))
    return np.asarray(image)
