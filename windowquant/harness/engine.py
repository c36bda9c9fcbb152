"""From a chat message with images or videos to a decoded answer, through a bound method and a protocol."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from windowquant.bound import Bound
from windowquant.errors import UserError
from windowquant.harness.conversation import Messages, media_of, processed
from windowquant.harness.loading import Loaded
from windowquant.models.features import VisualFeatures
from windowquant.protocols import Protocol, Reply, Session, answer
from windowquant.timing import timed

DEFAULT_NEW_TOKENS = 32


@dataclass(frozen=True)
class Answer:
    """One decoded answer, what it cost, and the session in which other answers can be scored.

    `vision_s`: seconds that the vision tower took for these media, whenever that was: its features are remembered. 0
    where they are part of the prefill, for an architecture whose features cannot be given on their own.
    """

    text: str
    reply: Reply
    session: Session
    vision_s: float


class Engine:
    """A loaded model with a bound method: answers messages one at a time, greedily."""

    def __init__(self, loaded: Loaded, bound: Bound, protocol: Protocol, max_new_tokens: int | None = None) -> None:
        self._loaded = loaded
        self._bound = bound
        self._protocol = protocol
        self._max_new_tokens = max_new_tokens

    def answer(self, messages: Messages, gen_kwargs: dict[str, Any]) -> Answer:
        """Answer one conversation of lmms-eval's chat form with one image or video, or several.

        `gen_kwargs` are the task's: `max_new_tokens` (unless this engine overrides it) and `until`, where the text is
        cut. Decoding is greedy; a task that asks for sampling or beams is refused.

        Raises:
            VideoError: a video or image is missing, unreadable or empty.
            UserError: neither image nor video, or not greedy.
        """
        if gen_kwargs.get("do_sample") or (gen_kwargs.get("num_beams") or 1) > 1:
            raise UserError("The task asks for sampling or beam search: only greedy decoding is measured here.")
        limit = self._max_new_tokens or gen_kwargs.get("max_new_tokens") or DEFAULT_NEW_TOKENS
        inputs, vision_s = self._inputs(messages)
        reply, session = answer(self._bound, inputs, self._protocol, limit, self._stop_ids())
        text = self._loaded.processor.tokenizer.decode(reply.tokens, skip_special_tokens=True)
        return Answer(_cut(text, gen_kwargs.get("until") or []), reply, session, vision_s)

    def processed(self, messages: Messages) -> Any:
        """The processor's output for one conversation, on the CPU."""
        return processed(self._loaded.processor, messages, self._loaded.frames)

    def inputs(self, messages: Messages) -> dict[str, Any]:
        """What `answer` takes, on the model's device, with vision features in place of pixels where that is exact."""
        return self._inputs(messages)[0]

    def _inputs(self, messages: Messages) -> tuple[dict[str, Any], float]:
        known, model, adapter = self.processed(messages), self._loaded.model, self._bound.adapter
        pixels = {name for name in adapter.pixel_keys if name in known}
        inputs = {name: value.to(model.device) for name, value in known.items() if name not in pixels}
        whole = {**inputs, **{name: known[name].to(model.device, model.dtype) for name in pixels}}
        if not adapter.exact_features:
            return whole, 0.0
        features, vision_s = self._features(whole, tuple(medium.identity() for medium in media_of(messages)))
        return {**inputs, "visual_features": features}, vision_s

    def _features(self, whole: dict[str, Any], media: Hashable) -> tuple[VisualFeatures, float]:
        """What the vision side makes of a request's media, and the seconds that it took for them."""
        found = self._loaded.features.get(media)
        if found is None:
            found = timed(self._loaded.model.device, lambda: self._bound.visual_features(whole))
            self._loaded.features.put(media, found, found[0].nbytes)
        return found

    def _stop_ids(self) -> list[int]:
        config, tokenizer = self._loaded.model.generation_config, self._loaded.processor.tokenizer
        ids = config.eos_token_id if config.eos_token_id is not None else tokenizer.eos_token_id
        return [i for i in (ids if isinstance(ids, list) else [ids]) if i is not None]


def _cut(text: str, until: list[str] | str) -> str:
    for stop in [until] if isinstance(until, str) else until:
        text = text.split(stop, 1)[0] if stop else text
    return text.strip()
