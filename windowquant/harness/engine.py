"""From a chat message with a video to a decoded answer, through a bound method and a protocol."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from windowquant.bound import Bound
from windowquant.errors import UserError
from windowquant.harness.loading import Loaded
from windowquant.harness.video import Identity, identity
from windowquant.protocols import Protocol, Reply, Session, answer
from windowquant.timing import timed

DEFAULT_NEW_TOKENS = 32


@dataclass(frozen=True)
class Answer:
    """One decoded answer, what it cost, and the session in which other answers can be scored.

    `vision_s`: seconds that the vision tower took for this video, whenever that was: its features are remembered.
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

    def answer(self, messages: list[dict[str, Any]], gen_kwargs: dict[str, Any]) -> Answer:
        """Answer one conversation of lmms-eval's chat form with exactly one video.

        `gen_kwargs` are the task's: `max_new_tokens` (unless this engine overrides it) and `until`, where the text is
        cut. Decoding is greedy; a task that asks for sampling or beams is refused.

        Raises:
            VideoError: the video is missing, unreadable or empty.
            UserError: no video or several, or not greedy.
        """
        if gen_kwargs.get("do_sample") or (gen_kwargs.get("num_beams") or 1) > 1:
            raise UserError("The task asks for sampling or beam search: only greedy decoding is measured here.")
        limit = self._max_new_tokens or gen_kwargs.get("max_new_tokens") or DEFAULT_NEW_TOKENS
        inputs, vision_s = self._inputs(messages)
        reply, session = answer(self._bound, inputs, self._protocol, limit, self._stop_ids())
        text = self._loaded.processor.tokenizer.decode(reply.tokens, skip_special_tokens=True)
        return Answer(_cut(text, gen_kwargs.get("until") or []), reply, session, vision_s)

    def processed(self, messages: list[dict[str, Any]]) -> Any:
        """The processor's output for one conversation, on the CPU."""
        video, turns = _split(messages)
        prompt = self._loaded.processor.apply_chat_template(turns, add_generation_prompt=True)
        return self._loaded.processor(text=[prompt], videos=[video], return_tensors="pt")

    def inputs(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """What `answer` takes, on the model's device, with vision features in place of pixels."""
        return self._inputs(messages)[0]

    def _inputs(self, messages: list[dict[str, Any]]) -> tuple[dict[str, Any], float]:
        processed, model = self.processed(messages), self._loaded.model
        features, vision_s = self._features(processed, identity(_split(messages)[0]))
        pixels = self._bound.adapter.pixel_keys
        rest = {name: value.to(model.device) for name, value in processed.items() if name not in pixels}
        return {**rest, "visual_features": features}, vision_s

    def _features(self, processed: Any, video: Identity) -> tuple[Tensor, float]:
        """The video's visual tokens [M, C], and the seconds that the vision tower took for them."""
        found = self._loaded.features.get(video)
        if found is None:
            model = self._loaded.model
            whole = processed.to(model.device, model.dtype)
            found = timed(model.device, lambda: self._bound.visual_features(whole))
            self._loaded.features.put(video, found, found[0].nbytes)
        return found

    def _stop_ids(self) -> list[int]:
        config, tokenizer = self._loaded.model.generation_config, self._loaded.processor.tokenizer
        ids = config.eos_token_id if config.eos_token_id is not None else tokenizer.eos_token_id
        return [i for i in (ids if isinstance(ids, list) else [ids]) if i is not None]


def _split(messages: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
    """The one video's path, and the turns with a bare placeholder in its place."""
    turns = [{"role": m["role"], "content": [_bare(item) for item in m["content"]]} for m in messages]
    media = [item for m in messages for item in m["content"] if item["type"] != "text"]
    if len(media) != 1 or media[0]["type"] != "video":
        kinds = ", ".join(item["type"] for item in media) or "nothing"
        raise UserError(f"A request must come with exactly one video; this one has {kinds}.")
    return str(media[0]["url"]), turns


def _bare(item: dict[str, Any]) -> dict[str, Any]:
    return item if item["type"] == "text" else {"type": item["type"]}


def _cut(text: str, until: list[str] | str) -> str:
    for stop in [until] if isinstance(until, str) else until:
        text = text.split(stop, 1)[0] if stop else text
    return text.strip()
