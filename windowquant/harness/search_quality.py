"""How well the window search finds the windows that hold the answer, and what it costs next to the prefill."""

import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from windowquant.cache.packed_cache import PackedCache
from windowquant.core.similarity import window_scores
from windowquant.harness import environment, machine
from windowquant.harness.benchmarks import build_task
from windowquant.harness.data import open_data
from windowquant.harness.engine import Engine
from windowquant.harness.files import write_json
from windowquant.harness.loading import Loaded, load
from windowquant.harness.settings import RunSettings
from windowquant.mini.evidence import auc, load_evidence, windows_with_evidence
from windowquant.protocols import Session
from windowquant.windowquant_method import WindowQuant

SIZE_7B = (100 * 196, 3584, 40)
"""Visual tokens of 100 frames of 196, channels of a 7B model, tokens of a question."""


def measure_task(settings: RunSettings, loaded: Loaded, method: WindowQuant) -> dict[str, Any]:
    """Mean AUC over a task's questions, and for how many it is defined; medians in ms of the search and of the
    language model's prefill (without the vision tower)."""
    data = open_data(settings.data)
    assert data.root is not None
    environment.prepare(data.root)
    task = build_task(settings.task, data)
    evidence = load_evidence(data.root, settings.task)
    found, search_ms, prefill_ms = [], [], []
    with method.bind(loaded.model, loaded.processor) as bound:
        engine = Engine(loaded, bound, "context")
        for row, intervals in list(zip(task.eval_docs, evidence, strict=True))[: settings.limit]:
            session = Session(bound, engine.inputs(task.doc_to_messages(row)))
            cache = session.cache
            assert isinstance(cache, PackedCache) and cache.stats.scores is not None
            scores = cache.stats.scores[0].tolist()
            found.append(auc(scores, windows_with_evidence(intervals, len(scores), method.window_size).tolist()))
            search_ms.append(1e3 * cache.stats.search_s)
            prefill_ms.append(1e3 * session.prefill_s)
    defined = [value for value in found if not np.isnan(value)]
    return {
        "task": settings.task,
        "auc": statistics.fmean(defined) if defined else None,
        "questions": len(found),
        "questions_with_both_kinds_of_window": len(defined),
        "search_ms": statistics.median(search_ms),
        "prefill_ms": statistics.median(prefill_ms),
    }


def search_at_7b_size(window_size: int = 32, repeats: int = 5) -> dict[str, Any]:
    """Median time to score the windows of 100 frames of 196 tokens of 3,584 channels, random bfloat16 embeddings."""
    tokens, channels, words = SIZE_7B
    generator = torch.Generator().manual_seed(0)
    visual = torch.randn(tokens, channels, generator=generator).bfloat16()
    text = torch.randn(words, channels, generator=generator).bfloat16()
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        window_scores(visual, text, window_size)
        times.append(1e3 * (time.perf_counter() - start))
    return {
        "visual_tokens": tokens,
        "channels": channels,
        "dtype": "bfloat16",
        "search_ms": statistics.median(times[1:]),
    }


def measure_search(settings: list[RunSettings], path: Path) -> dict[str, Any]:
    """All tasks of a model, and the 7B size; written to `path` as JSON."""
    loaded = load(settings[0].model, settings[0].torch_device)
    method = WindowQuant()
    result = {
        "model": settings[0].model.name,
        "stand_in": settings[0].model.stand_in,
        "method": method.described(),
        "threads": torch.get_num_threads(),
        "machine": machine.describe(settings[0].torch_device),
        "tasks": [measure_task(each, loaded, method) for each in settings],
        "search_at_7b_size": search_at_7b_size(method.window_size),
    }
    write_json(path, result)
    return result
