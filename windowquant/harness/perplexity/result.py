"""From readings of documents to a record, and from the record to a table."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

import numpy as np

from windowquant.harness.perplexity.score import Reading
from windowquant.method import Method
from windowquant.report.label import label

REFERENCE = "fp16"
RESAMPLES = 10_000
COLUMNS = (
    "method", "status", "perplexity", "95 % interval", "times FP16's", "95 % interval", "bits", "cache bits",
)  # fmt: skip


def row(name: str, method: Method, params: Mapping[str, Any], readings: Sequence[Reading]) -> dict[str, Any]:
    """What a record keeps of one method: every document's mean NLL (nats), and means over documents of the rest."""
    means = {
        field: fmean(asdict(r)[field] for r in readings) for field in ("bits", "cache_bits", "kv_bytes", "seconds")
    }
    return {
        "method": name,
        "params": dict(params),
        "status": method.status,
        "perplexity": math.exp(fmean(reading.nll for reading in readings)),
        **means,
        "nll": [reading.nll for reading in readings],
    }


def interval(nll: Sequence[float]) -> tuple[float, float]:
    """95 % interval of exp(mean) over documents: percentiles of a seeded bootstrap."""
    values = np.asarray(nll)
    drawn = np.random.default_rng(0).integers(0, len(values), (RESAMPLES, len(values)))
    low, high = np.exp(np.quantile(values[drawn].mean(1), [0.025, 0.975]))
    return float(low), float(high)


def compared(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with intervals, and with the ratio of their perplexity to FP16's on the same documents.

    The interval of the ratio is over documents, paired. Ratios are None where FP16 was not run.
    """
    reference = next((row["nll"] for row in rows if row["method"] == REFERENCE), None)
    found = []
    for each in rows:
        more: dict[str, Any] = {"ci95": interval(each["nll"]), "ratio": None, "ratio_ci95": None}
        if reference is not None:
            lost = [own - other for own, other in zip(each["nll"], reference, strict=True)]
            more |= {"ratio": math.exp(fmean(lost)), "ratio_ci95": interval(lost)}
        found.append({**each, **more})
    return found


def to_markdown(record: Mapping[str, Any]) -> str:
    """The table, with what was read and how."""
    setting = record["setting"]
    lines = [
        f"# Perplexity through packed caches: {setting['model']['name']}",
        f"Created {record['created']} from `{record['file']}`. Text: {setting['text']['source']}, "
        f"{setting['documents']} stretches of it. Of each, {setting['context']} tokens are prefilled (exactly, as in "
        f"every method here) and stored as the method says; the {setting['scored']} tokens after the next one are "
        f"scored, teacher-forced in passes of {setting['chunk']}, by queries that read the packed cache.",
        f"A text has no visual tokens, so its first {setting['context']} tokens stand in for the video: methods of "
        f"windows (of {setting['window_size']} tokens) and of single tokens quantize these and keep what follows in 16 "
        "bit; streaming methods (kivi, skvq) and transformers' own caches (hf_*) quantize the scored tokens too, as "
        "they age. bits: held per element of K and V of the first tokens, scales included; cache bits: of all tokens. "
        "Intervals: bootstrap over documents; that of the ratio is paired.",
        _grid([COLUMNS, ["---"] * len(COLUMNS), *(_cells(each) for each in record["rows"])]),
    ]
    return "\n\n".join(lines) + "\n"


def _cells(each: Mapping[str, Any]) -> list[str]:
    ratio = "-" if each["ratio"] is None else f"{each['ratio']:.3f}"
    return [
        label(each),
        each["status"],
        f"{each['perplexity']:.2f}",
        _span(each["ci95"], ".2f"),
        ratio,
        "-" if each["ratio_ci95"] is None else _span(each["ratio_ci95"], ".3f"),
        f"{each['bits']:.2f}",
        f"{each['cache_bits']:.2f}",
    ]


def _span(ends: Sequence[float], form: str) -> str:
    return f"{ends[0]:{form}} to {ends[1]:{form}}"


def _grid(rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)
