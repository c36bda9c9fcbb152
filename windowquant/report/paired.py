"""Whether a method answers differently from FP16 on the same documents, or only by chance."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

REFERENCE = "fp16"
RESAMPLES = 9999


def mark_paired(rows: Sequence[dict[str, Any]]) -> None:
    """Set `p_fp16`, `lost` and `gained` on each row whose own samples and FP16's lie beside their records.

    `lost` documents FP16 scored higher on, `gained` lower; `p_fp16` is the two-sided p of `paired_p`. All three are
    None for FP16 itself, for rows of several runs, and where samples are missing.
    """
    references = {_setting(row): row for row in rows if row["method"] == REFERENCE}
    for row in rows:
        row.update(p_fp16=None, lost=None, gained=None)
        reference = references.get(_setting(row))
        if reference is None or reference is row or row["runs"] > 1:
            continue
        before, after = (_scores(Path(r["record"]).with_suffix(".jsonl")) for r in (reference, row))
        shared = sorted(before.keys() & after.keys())
        if shared:
            a, b = (np.array([scores[doc] for doc in shared]) for scores in (before, after))
            row.update(p_fp16=paired_p(a, b), lost=int((a > b).sum()), gained=int((a < b).sum()))


def paired_p(reference: np.ndarray, method: np.ndarray) -> float:
    """Two-sided p that both score alike on the same documents, [n] each: McNemar's exact test where every score is 0 or
    1, else a sign-flip permutation test of the mean difference (seeded)."""
    differs = reference != method
    if not differs.any():
        return 1.0
    if np.isin([reference, method], (0.0, 1.0)).all():
        return float(stats.binomtest(int((reference > method).sum()), int(differs.sum())).pvalue)
    result = stats.permutation_test(
        (method - reference,),
        np.mean,
        permutation_type="samples",
        n_resamples=RESAMPLES,
        rng=np.random.default_rng(0),
    )
    return float(result.pvalue)


def _setting(row: Mapping[str, Any]) -> tuple[str, ...]:
    return row["model"], row["task"], row["protocol"]


def _scores(samples: Path) -> dict[Any, float]:
    """Official score of each document, by id; none where there is no file."""
    if not samples.is_file():
        return {}
    lines = [json.loads(line) for line in samples.read_text(encoding="utf-8").splitlines()]
    return {line["doc_id"]: float(line["official"]) for line in lines if "official" in line}
