"""WindowQuant (and every other method) as a chat model of lmms-eval."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

from lmms_eval.api.instance import GenerationResult, Instance, TokenCounts
from lmms_eval.api.model import lmms
from tqdm import tqdm

from windowquant.errors import UserError
from windowquant.harness.engine import Answer, Engine
from windowquant.harness.loading import Loaded, load
from windowquant.harness.methods import build_method
from windowquant.harness.settings import ModelSettings, check_protocol, resolve_device
from windowquant.harness.video import VideoError
from windowquant.method import Method
from windowquant.protocols import Protocol

FAILED = "\x00unreadable video"
"""Answer to a document whose video cannot be read, where the caller counts such documents itself."""

Observer = Callable[[int, Answer | VideoError], None]
Progress = Callable[[int, int], None]


class EvaluatedModel(lmms):
    """A loaded model under one method and protocol, as lmms-eval calls it.

    Args:
        loaded, method, protocol, max_new_tokens: see `Engine`.
        observer: called with the document id and its answer, or with the error where the video cannot be read; without
            one, such a video ends the evaluation (lmms-eval would score an empty answer as a random guess).
        progress: told (requests done, requests in all) after each; None draws a bar.
    """

    is_simple = False

    def __init__(
        self,
        loaded: Loaded,
        method: Method,
        protocol: Protocol,
        max_new_tokens: int | None = None,
        observer: Observer | None = None,
        progress: Progress | None = None,
    ) -> None:
        super().__init__()
        self.device = loaded.model.device
        self._loaded = loaded
        self._method = method
        self._protocol = protocol
        self._max_new_tokens = max_new_tokens
        self._observer = observer
        self._progress = progress

    def generate_until(self, requests: list[Instance]) -> list[GenerationResult]:
        """Answer every request, in order; the first one is answered twice.

        What is compiled or allocated at first use would else be in the times of the first answer.
        """
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("default", module=r"windowquant\.")  # importing lmms-eval silences every warning
            bound = stack.enter_context(self._method.bind(self._loaded.model, self._loaded.processor))
            loaded = self._loaded.showing(self._method.frames(self._loaded.frames))
            engine = Engine(loaded, bound, self._protocol, self._max_new_tokens)
            for request in requests[:1]:
                with suppress(VideoError):  # it is told when its turn comes
                    self._reply(engine, request)
            return [self._answer(engine, request) for request in self._counted(requests)]

    def _counted(self, requests: list[Instance]) -> Iterator[Instance]:
        bar = tqdm(requests, desc=self._method.name, disable=self._progress is not None or self.rank != 0)
        for done, request in enumerate(bar, start=1):
            yield request
            if self._progress is not None:
                self._progress(done, len(requests))

    def _reply(self, engine: Engine, request: Instance) -> Answer:
        _, doc_to_messages, gen_kwargs, doc_id, task, split = request.args
        return engine.answer(doc_to_messages(self.task_dict[task][split][doc_id]), gen_kwargs)

    def _answer(self, engine: Engine, request: Instance) -> GenerationResult:
        doc_id = request.args[3]
        try:
            answer = self._reply(engine, request)
        except VideoError as error:
            if self._observer is None:
                raise
            self._observer(doc_id, error)
            return GenerationResult(FAILED)
        if self._observer is not None:
            self._observer(doc_id, answer)
        return GenerationResult(answer.text, TokenCounts(output_tokens=len(answer.reply.tokens)))

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        raise UserError("Likelihood tasks read no generated token: use a task that generates.")

    def generate_until_multi_round(self, requests: list[Instance]) -> list[str]:
        raise UserError("Tasks of several rounds are not supported: use a task of one question per video.")

    def clean(self) -> None:
        """Keep the model: lmms-eval would delete it after one evaluation."""


class WindowQuantModel(EvaluatedModel):
    """What `lmms_eval --model windowquant --model_args pretrained=...,method=...,alpha=...` builds.

    Args:
        pretrained: local folder, hub id, or name of an embedded checkpoint.
        method: name of the method; further arguments are its hyper-parameters.
        protocol: context, paper or cached.
        frames: uniformly spaced frames per video.
        max_pixels: most pixels of a frame, for a model that keeps a video's own resolution.
        dtype, revision, trust_remote_code: as in `from_pretrained`.
        max_new_tokens: overrides the task's.
        device: as torch writes it; `auto` is the GPU where there is one.
    """

    def __init__(
        self,
        pretrained: str = "mini_llava_onevision",
        method: str = "windowquant",
        protocol: Protocol = "context",
        frames: int = 96,
        max_pixels: int | None = None,
        dtype: str = "auto",
        revision: str | None = None,
        trust_remote_code: bool = False,
        max_new_tokens: int | None = None,
        device: str = "auto",
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        **params: Any,
    ) -> None:
        if int(batch_size) != 1:
            raise UserError(f"batch_size is {batch_size}: requests are measured one at a time, use 1.")
        model = ModelSettings(pretrained, pretrained, frames, revision, dtype, trust_remote_code, max_pixels=max_pixels)
        check_protocol(protocol)
        chosen = build_method(method, params)
        super().__init__(load(model, resolve_device(device)), chosen, protocol, max_new_tokens)
