"""One pass of a model over a task, through lmms-eval's own evaluator."""

from typing import Any

from lmms_eval.evaluator import simple_evaluate
from lmms_eval.tasks import TaskManager

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
    results: dict[str, Any] = simple_evaluate(
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
