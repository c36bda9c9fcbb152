"""Run records for tests of what is made of them."""

from typing import Any

from windowquant.harness.record import SCHEMA, RunRecord
from windowquant.harness.settings import digest

_TIMES = {"median": 0.2, "q25": 0.1, "q75": 0.3}


def make_record(**changes: Any) -> RunRecord:
    """A plausible record; its fingerprint follows from the rest."""
    values: dict[str, Any] = {
        "schema": SCHEMA,
        "config": {"limit": 10},
        "model": "tiny",
        "model_id": "/models/tiny",
        "model_revision": None,
        "model_fingerprint": "m0",
        "stand_in": True,
        "method": "fp16",
        "params": {"window_size": 32},
        "task": "nextqa",
        "benchmark": "nextqa_mc_test",
        "metric": "exact_match",
        "data_id": "local",
        "data_fingerprint": "d0",
        "protocol": "context",
        "seed": 0,
        "limit": 10,
        "accuracy": 80.0,
        "n": 10,
        "ci95": (49.0, 94.0),
        "strict_accuracy": 70.0,
        "strict_ci95": (40.0, 89.0),
        "unparsable": 1,
        "empty": 0,
        "errors": [],
        "kl": 0.01,
        "kl_se": 0.002,
        "kl_n": 10,
        "agreement": 98.0,
        "alpha": None,
        "bits": {"16": 1.0},
        "avg_bits": 16.0,
        "visual_tokens": 33.0,
        "kv_bytes": 1000.0,
        "kv_breakdown": {"codes": 0.0, "tail": 1000.0},
        "kv_predicted": 990.0,
        "kv_fp16": 1000.0,
        "kv_ratio": 1.0,
        "peak_memory": {"rss": 1 << 30, "cuda": None},
        "vision_s": _TIMES,
        "prefill_s": _TIMES,
        "question_s": _TIMES,
        "decode_s": _TIMES,
        "search_s": _TIMES,
        "pack_s": _TIMES,
        "tokens_per_s": 20.0,
        "machine": {"cpu": "abacus", "packages": {"torch": "2"}},
        "started": "2026-01-01T00:00:00+00:00",
        "duration_s": 3.0,
        **changes,
    }
    return RunRecord(**{"fingerprint": digest(values), **values})
