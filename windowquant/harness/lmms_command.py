"""The model as lmms-eval's own command line builds it."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lmms_eval.api.instance import GenerationResult, Instance

from windowquant.errors import UserError
from windowquant.harness.lmms_model import WindowQuantModel


class CommandLineModel(WindowQuantModel):
    """Answers bad input with its sentence alone and exit code 2.

    lmms-eval's command would print a traceback instead, go on, and exit with 0.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with _told():
            super().__init__(*args, **kwargs)

    def generate_until(self, requests: list[Instance]) -> list[GenerationResult]:
        with _told():
            return super().generate_until(requests)

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        with _told():
            return super().loglikelihood(requests)

    def generate_until_multi_round(self, requests: list[Instance]) -> list[str]:
        with _told():
            return super().generate_until_multi_round(requests)


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except UserError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
