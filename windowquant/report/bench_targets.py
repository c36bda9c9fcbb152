"""Which of the ratios that the benchmarks are to reach are reached, from the records of one folder."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from windowquant.report.bench_rows import Row, measured, median, most_threads

HEADS, TOKENS = "llava_onevision_7b", 16384
"""4 KV heads x 7 query heads, D 128."""
OURS, STEP = "windowquant paper", "windowquant paper, step"
STOCK, ROWS = "SDPA as transformers calls it", "SDPA, query group as rows"


@dataclass(frozen=True)
class Target:
    """A ratio, what it is to be at least (or, with `most`, at most), and how much it is."""

    what: str
    threads: int
    wanted: float
    value: float
    most: bool = False

    @property
    def reached(self) -> bool:
        """Whether the ratio is what it is to be."""
        return self.value <= self.wanted if self.most else self.value >= self.wanted


def kernel_targets(record: Mapping[str, Any]) -> Iterator[Target]:
    """Of attention over 16,384 visual tokens with the paper's mix, for each number of threads."""
    rows = measured(record["kernels"], shape=HEADS, visual_tokens=TOKENS)
    for count in sorted({row["threads"] for row in rows}):
        own = [row for row in rows if row["threads"] == count]
        for contender, dtype, wanted in (  # ours in the same dtype
            (STOCK, "bfloat16", 10.0),
            (STOCK, "float32", 4.0),
            (ROWS, "float32", 1.5),
            (ROWS, "bfloat16", 1.5),
        ):
            ours, other = (median(own, contender=name, dtype=dtype) for name in (OURS, contender))
            if ours and other:
                yield Target(f"attention: {contender}, {dtype}, over ours", count, wanted, other / ours)
        quantos = measured(own, contender="QuantizedCache hf_quanto, step")
        step = median(own, contender=STEP, dtype=quantos[0]["dtype"]) if quantos else None
        quanto = median(quantos)
        if step and quanto:
            yield Target("step: QuantizedCache (quanto INT4) over ours", count, 20.0, quanto / step)
    yield from _scaling(record)


def _scaling(record: Mapping[str, Any]) -> Iterator[Target]:
    """Four times the tokens should take at most a little more than four times as long; two threads about half."""
    for dtype in ("float32", "bfloat16"):
        yield from _scaling_in(dtype, measured(record["kernels"], shape=HEADS, contender=OURS, dtype=dtype))


def _scaling_in(dtype: str, rows: list[Row]) -> Iterator[Target]:
    most = most_threads(rows)
    for count in sorted({row["threads"] for row in rows}):
        short = median(rows, visual_tokens=TOKENS, threads=count)
        long = median(rows, visual_tokens=4 * TOKENS, threads=count)
        if short and long:
            what = f"attention, {dtype}: time of 65,536 tokens over four times that of 16,384"
            yield Target(what, count, 1.15, long / short / 4, most=True)
    one, all_ = (median(rows, visual_tokens=TOKENS, threads=count) for count in (1, most))
    if most > 1 and one and all_:
        yield Target(f"attention, {dtype}: time of 1 thread over that of {most}", most, 0.85 * most, one / all_)


def decode_targets(record: Mapping[str, Any]) -> Iterator[Target]:
    """Of decoding with the longest video that `DynamicCache` and ours were measured on at batch 1, and of packing."""
    rows = measured(record["decode"], visual_tokens=19600, batch=1)
    for count in sorted({row["threads"] for row in rows}):
        own = [row for row in rows if row["threads"] == count]
        ours, other = median(own, contender="windowquant"), median(own, contender="dynamic")
        if ours and other:
            what = f"decode: tokens/s over DynamicCache's, 19,600 visual tokens{_limit(record, count, other)}"
            yield Target(what, count, 2.0, other / ours)
    held = {row["contender"]: row["kv_bytes"] for row in rows}
    ratios = {row["contender"]: row["kv_ratio_16_bit"] for row in rows}
    if {"windowquant", "dynamic"} <= set(held):
        most = most_threads(rows)
        yield Target("decode: KV bytes over DynamicCache's", most, 0.3, held["windowquant"] / held["dynamic"], True)
        yield Target("decode: KV bytes over 16 bits an element", most, 0.3, ratios["windowquant"], True)
    for row in record["packing"]:
        what = f"packing over prefill, {row['shape']}, {row['visual_tokens']:,} visual tokens"
        yield Target(what, row["threads"], 0.05, row["pack_of_prefill"], most=True)


def _limit(record: Mapping[str, Any], threads: int, seconds: float) -> str:
    """What a step of so many seconds could gain, if the cache cost no more than `DynamicCache` with few tokens does."""
    rows = measured(record["decode"], batch=1, contender="dynamic", threads=threads)
    fewest = min(row["visual_tokens"] for row in rows)
    least = median(rows, visual_tokens=fewest)
    if least is None or fewest == 19600:
        return ""
    return f" (DynamicCache with {fewest:,}: {seconds / least:.2f})"
