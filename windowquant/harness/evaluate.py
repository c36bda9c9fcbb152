"""One pass of a model over a task, through lmms-eval's own evaluator."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lmms_eval import evaluator
from lmms_eval.api import task as task_module
from lmms_eval.tasks import TaskManager
from tqdm import tqdm

from windowquant.harness.benchmarks import Benchmark, CountedTask
from windowquant.harness.lmms_model import EvaluatedModel
from windowquant.harness.scores import Scores, score


def evaluate(model: EvaluatedModel, spec: Benchmark, task: CountedTask, limit: int | None, seed: int) -> Scores:
    """Evaluate and score. Documents are scored one after another, so that lmms-eval's random guesses for answers that
    its parsers cannot read depend on `seed` alone.

    Raises:
        UserError: no video could be read.
    """
    name = str(task.config.task)
    with _without_bars():
        results: dict[str, Any] = evaluator.simple_evaluate(
            model=model,
            tasks=[task],
            task_manager=TaskManager(include_defaults=False),
            limit=limit,
            bootstrap_iters=0,
            process_docs_parallel=1,
            random_seed=seed,
            numpy_random_seed=seed,
            torch_random_seed=seed,
        )
    official = results["results"][name].get(f"{task.metric},none", 0.0)
    return score(spec, task.metric, float(official), results["samples"][name], seed)


class _NoBar(tqdm):
    """Counts without drawing, whatever it is asked for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "disable": True})


@contextmanager
def _without_bars() -> Iterator[None]:
    """Within, lmms-eval draws none of its own progress, which comes between the lines of ours: building the requests,
    and scoring the answers, take no time that is worth a bar."""
    modules = (evaluator, task_module)
    before = [module.tqdm for module in modules]
    for module in modules:
        module.tqdm = _NoBar
    try:
        yield
    finally:
        for module, own in zip(modules, before, strict=True):
            module.tqdm = own
