"""Colours and words that the pictures share."""

from textwrap import fill, shorten

from windowquant.explain.explanation import Explanation

WIDTHS = {16: "#08306b", 8: "#2a72b5", 4: "#79b5d9", 2: "#cfe1f2", 1: "#f1e8d6", 0: "#d4d4d4"}
"""Colour of each bit-width: the darker, the more precise. 0 stands for dropped."""
SCORE = "#e08214"
KINDS = {
    "codes": ("packed codes", "#79b5d9"),
    "scale_zero": ("scales, offsets", "#b9a3cf"),
    "fp16_windows": ("visual, 16 bit", "#08306b"),
    "tail": ("text", "#8fbf8f"),
    "slack": ("room", "#dddddd"),
    "index": ("index", "#999999"),
}
"""Name and colour of each kind of bytes that a cache holds, see `KVBytes`."""


def width_name(bits: int) -> str:
    """A bit-width in the legend's words."""
    return {16: "16 bit", 0: "dropped"}.get(bits, f"INT{bits}" if bits > 1 else "1 bit")


def size(count: float) -> str:
    """Bytes in the unit that suits them (decimal)."""
    for unit, step in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(count) >= step:
            return f"{count / step:.3g} {unit}"
    return f"{count:.0f} bytes"


def ratio(explanation: Explanation) -> str:
    """The bytes held against FP16's, in words."""
    times = explanation.fp16_bytes / explanation.kv.total
    return f"{times:.2f} times smaller" if times >= 1 else f"{1 / times:.2f} times FP16"


def window_label(explanation: Explanation) -> str:
    """What the axis of windows counts."""
    count = explanation.window_size
    return f"window of {count} visual tokens" if count > 1 else "visual token, each a window of its own"


def said(label: str, text: str, width: int = 150, most: int = 450) -> str:
    """A question or an answer with its label, cut and wrapped."""
    return fill(f"{label}: {shorten(text, most, placeholder=' ...') or '(nothing)'}", width, subsequent_indent="      ")


def origin(explanation: Explanation) -> str:
    """Model, method and protocol in one line; a stand-in is called one."""
    model = explanation.model
    if explanation.stand_in:
        model += " (a small stand-in trained on generated videos, not one of the paper's models)"
    alpha = explanation.plan and explanation.plan.alpha
    method = explanation.method_name + ("" if alpha is None else f", alpha {alpha:.3g}")
    return f"{model}  |  {method}  |  protocol {explanation.protocol}"


def asked(explanation: Explanation) -> str:
    """Question, and answer with what its cache saved, in two short lines."""
    question, answer = (shorten(text, 60, placeholder=" ...") for text in (explanation.question, explanation.answer))
    return f"Q: {question}\nA: {answer or '(nothing)'}  ({ratio(explanation)})"
