"""Official and strict score of a run, from lmms-eval's samples and the collected answers."""

from dataclasses import dataclass
from statistics import mean
from typing import Any

from windowquant.errors import UserError
from windowquant.harness.benchmarks import Benchmark
from windowquant.harness.lmms_model import FAILED
from windowquant.harness.scoring import bootstrap, parse_letter, target_letter, wilson


@dataclass(frozen=True)
class Scores:
    """Accuracies and intervals in percent over `n` documents; `samples` is one dictionary a document."""

    accuracy: float
    ci95: tuple[float, float]
    strict: float
    strict_ci95: tuple[float, float]
    n: int
    unparsable: int
    empty: int
    samples: list[dict[str, Any]]


def score(spec: Benchmark, metric: str, official: float, samples: list[dict[str, Any]], seed: int) -> Scores:
    """Score a run.

    Args:
        metric: name of the benchmark's main metric, a key of each sample.
        official: lmms-eval's aggregate, 0 to 1.
        samples: lmms-eval's logged samples; failed documents are left out of both scores.

    Raises:
        UserError: no document is left.
    """
    read = [_read(spec, metric, s) for s in sorted(samples, key=lambda s: s["doc_id"]) if s["resps"][0][0] != FAILED]
    if not read:
        raise UserError(f"No video of {spec.task} could be read: check the data folder.")
    shares = [s["strict"] for s in read]
    n = len(read)
    if spec.kind == "choice":
        interval, strict_interval = wilson(official * n, n), wilson(sum(shares), n)
    else:
        interval, strict_interval = bootstrap([s["official"] for s in read], seed), bootstrap(shares, seed)
    return Scores(
        accuracy=100 * official,
        ci95=interval,
        strict=100 * mean(shares),
        strict_ci95=strict_interval,
        n=n,
        unparsable=sum(bool(s["text"]) and s["letter"] is None for s in read) if spec.kind == "choice" else 0,
        empty=sum(not s["text"] for s in read),
        samples=read,
    )


def _read(spec: Benchmark, metric: str, sample: dict[str, Any]) -> dict[str, Any]:
    text, official = sample["resps"][0][0], _value(sample[metric])
    read = {"doc_id": sample["doc_id"], "text": text, "official": official, "target": str(sample["target"])}
    if spec.kind == "share":
        return {**read, "strict": official if text else 0.0}
    letter = parse_letter(text)
    return {**read, "letter": letter, "strict": float(letter == target_letter(sample["target"]))}


def _value(item: Any) -> float:
    """A document's score as lmms-eval keeps it: a number, or EgoSchema's pair of indices."""
    if isinstance(item, dict):
        return float(str(item["pred"]) == str(item["ground_truth"]))
    return float(item)
