"""From the measurements of single requests to those of a run."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import mean
from typing import Any

import numpy as np

from windowquant.planning import kv_shape
from windowquant.protocols import Reply


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles: `median`, `q25`, `q75` (zeros for no values)."""
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75]) if len(values) else (0.0, 0.0, 0.0)
    return {"median": float(middle), "q25": float(low), "q75": float(high)}


def fidelity(divergences: Mapping[int, tuple[float, float]]) -> dict[str, Any]:
    """Mean KL with its standard error over documents, and agreement in percent; None where nothing was compared."""
    n = len(divergences)
    if n == 0:
        return {"kl": None, "kl_se": None, "kl_n": 0, "agreement": None}
    kl, agreement = np.array(list(divergences.values())).T
    error = float(kl.std(ddof=1) / np.sqrt(n)) if n > 1 else None
    return {"kl": float(kl.mean()), "kl_se": error, "kl_n": n, "agreement": 100 * float(agreement.mean())}


def bytes_per_token(config: Any) -> int:
    """Bytes of one token's K and V in 16 bits, all layers: 2 tensors x 2 bytes x layers x KV heads x head_dim."""
    text = config.get_text_config()
    heads, channels = kv_shape(text)
    return 4 * text.num_hidden_layers * heads * channels


def measure(replies: Sequence[Reply], token_bytes: int, whole_fp16: float | None = None) -> dict[str, Any]:
    """The measured fields of a record: sizes are means per request, times and alphas medians and quartiles over
    requests (of decoding: over tokens).

    Args:
        token_bytes: what a token's K and V take in 16 bits, see `bytes_per_token`. The last answer token is never run,
            so it is in no cache.
        whole_fp16: bytes a request of FP16 on the whole videos, where the method was shown less of them.
    """
    held = mean(reply.kv.total for reply in replies)
    fp16 = whole_fp16 or token_bytes * mean(reply.prompt_tokens + len(reply.tokens) - 1 for reply in replies)
    alphas = [reply.plan.alpha for reply in replies if reply.plan is not None and reply.plan.alpha is not None]
    steps = [seconds for reply in replies for seconds in reply.decode_s]
    return {
        "alpha": spread(alphas) if alphas else None,
        "bits": _mean_by_key([reply.bits for reply in replies]),
        "avg_bits": mean(reply.average_bits for reply in replies),
        "visual_tokens": mean(reply.visual_tokens for reply in replies),
        "kv_bytes": held,
        "kv_breakdown": _mean_by_key([asdict(reply.kv) for reply in replies]),
        "kv_predicted": mean(reply.kv_predicted for reply in replies),
        "kv_fp16": fp16,
        "kv_ratio": fp16 / held,
        "prefill_s": spread([reply.prefill_s for reply in replies]),
        "question_s": spread([reply.question_s for reply in replies]),
        "decode_s": spread(steps),
        "search_s": spread([reply.search_s for reply in replies]),
        "pack_s": spread([reply.pack_s for reply in replies]),
        "tokens_per_s": len(steps) / sum(steps) if steps else None,
    }


def _mean_by_key(rows: Sequence[Mapping[Any, float]]) -> dict[str, float]:
    """Mean of each key over the rows, a missing one counting as 0."""
    keys = dict.fromkeys(key for row in rows for key in row)
    return {str(key): sum(row.get(key, 0.0) for row in rows) / len(rows) for key in keys}
