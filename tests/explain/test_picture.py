"""What the pictures show, read back from the figures and files themselves."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from windowquant.cache.kv_bytes import KVBytes
from windowquant.core.plan import BitPlan
from windowquant.errors import UserError
from windowquant.explain import Explanation
from windowquant.explain.picture import plan_grid
from windowquant.explain.several import compare
from windowquant.explain.style import size

GREY = 6  # of frame i is GREY * i


def made(count: int = 12, **changes: object) -> Explanation:
    """So many frames of 8 tokens each, three windows of 32."""
    plan = BitPlan(((16, 4, 2), (16, 2, 2)), 32, "made up", alpha=2.0)
    shown = tuple(np.full((6, 8, 3), GREY * i, np.uint8) for i in range(count))
    values = Explanation(
        model="mini_model",
        stand_in=True,
        method_name="windowquant",
        method="windowquant()",
        protocol="context",
        question="who pays $5 or $6?",
        answer="the man",
        window_size=32,
        picture_tokens=(8,) * count,
        scores=(0.0, 0.5, 1.0),
        sensitivity=(0.8, 0.9),
        thresholds=((0.6, 0.9), (0.7, 0.95)),
        widths=(16, 4, 2),
        plan=plan,
        drops_visual=False,
        bits={16: 0.5, 4: 0.25, 2: 0.25},
        average_bits=7.5,
        kv=KVBytes(codes=300, scale_zero=100, fp16_windows=500, tail=100),
        fp16_bytes=4000,
        frames=shown,
    )
    return replace(values, **changes)


def shown(figure: Figure) -> list[tuple[float, int]]:
    """Where each thumbnail's middle is on the axis of windows, and its frame, told by its grey."""
    figure.canvas.draw()
    strip = figure.axes[0]
    found = []
    for child in strip.child_axes:
        box = child.get_position(original=True)
        x = strip.transData.inverted().transform(figure.transFigure.transform((box.x0 + box.width / 2, 0)))[0]
        found.append((float(x), int(child.get_images()[0].get_array()[0, 0, 0]) // GREY))
    return found


def texts(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def test_each_frame_stands_over_its_own_tokens() -> None:
    # frame i holds tokens 8 i to 8 i + 8, and window w, centred at w, tokens 32 w to 32 w + 32
    expected = [((8 * i + 4) / 32 - 0.5, i) for i in range(12)]
    assert shown(made().figure()) == [(pytest.approx(x, abs=0.01), frame) for x, frame in expected]


def test_of_many_frames_those_at_equal_steps_are_shown() -> None:
    found = shown(made(40).figure())
    assert [frame for _, frame in found] == [2 * i + 1 for i in range(20)]


def test_merged_frames_share_their_tokens() -> None:
    found = made(picture_tokens=(8, 32, 8), frames=made(6).frames)
    middles = [2, 6, 16, 32, 42, 46]  # of 4, 4, 16, 16, 4 and 4 tokens
    assert shown(found.figure()) == [(pytest.approx(x / 32 - 0.5, abs=0.01), i) for i, x in enumerate(middles)]


def test_tokens_outside_of_the_windows_stay_in_16_bits_and_dropped_ones_go() -> None:
    windows, layers, bits = plan_grid(made(picture_tokens=(50, 50)))
    assert windows.tolist() == [-0.5, 0.5, 1.5, 2.5, 100 / 32 - 0.5]
    assert layers.tolist() == [-0.5, 0.5, 1.5]
    assert bits.tolist() == [[16, 4, 2, 16], [16, 2, 2, 16]]
    empty = BitPlan(((), ()), 32, "drops")
    assert plan_grid(made(plan=empty, drops_visual=True))[2].tolist() == [[0], [0]]


def test_k_and_v_that_differ_are_drawn_over_each_other() -> None:
    plan = BitPlan(((16, 4, 2), (16, 2, 2)), 32, "", v_bits=((16, 2, 1), (16, 1, 1)), alpha=2.0)
    _, layers, bits = plan_grid(made(plan=plan))
    assert layers.tolist() == [-0.5, 0.0, 0.5, 1.0, 1.5]
    assert bits.tolist() == [[16, 4, 2], [16, 2, 1], [16, 2, 2], [16, 1, 1]]


def test_the_svg_says_what_it_shows(tmp_path: Path) -> None:
    made().save(tmp_path / "a.svg")
    found = texts(tmp_path / "a.svg")
    for words in (
        "Q: who pays $5 or $6?",
        "A: the man",
        "stand-in",
        "alpha 2",
        "INT4",
        "sensitivity s",
        "window of 32 visual tokens",
        "KV cache: 4.00 times smaller",
        "packed codes, 300 bytes",
        "4 kB",
    ):
        assert words in found
    assert "stand-in" not in (made(stand_in=False).save(tmp_path / "b.svg") or texts(tmp_path / "b.svg"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"scores": None, "thresholds": None, "sensitivity": None}, "looks at no content"),
        ({"plan": None, "scores": None, "thresholds": None, "sensitivity": None}, "nothing is planned"),
        ({"kv": KVBytes(tail=8000), "plan": None}, "2.00 times FP16"),
        ({"frames": None}, "no frames were given"),
        ({"scores": (), "plan": BitPlan(((), ()), 32, "", alpha=2.0)}, "no window is whole"),
        ({"scores": (-0.1, 0.0, 0.05)}, "score"),
        ({"widths": (16, 8, 4, 2)}, "score that leads to each width"),
        ({"answer": ""}, "A: (nothing)"),
        ({"window_size": 1, "picture_tokens": (1, 1, 1)}, "each a window of its own"),
    ],
    ids=lambda value: "" if isinstance(value, str) else ",".join(value),
)
def test_what_is_missing_is_said(changes: dict, words: str, tmp_path: Path) -> None:
    made(**changes).save(tmp_path / "a.svg")
    assert words in texts(tmp_path / "a.svg")


def test_a_picture_is_a_picture(tmp_path: Path) -> None:
    made().save(tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as image:
        assert image.width > 1000 and image.height > 500
        assert len(image.convert("RGB").getcolors(1 << 20)) > 50
    assert made()._repr_png_().startswith(b"\x89PNG")
    made().save(tmp_path / "a.pdf")
    assert (tmp_path / "a.pdf").read_bytes().startswith(b"%PDF")


def test_questions_are_rows_of_scores(tmp_path: Path) -> None:
    figure = compare([made(), made(question="and then?", answer="no", scores=(1.0, 0.25, 0.0))])
    (mesh,) = [mesh for axes in figure.axes for mesh in axes.collections if mesh.get_array().size == 6]
    assert mesh.get_array().tolist() == [[0.0, 0.5, 1.0], [1.0, 0.25, 0.0]]
    assert [frame for _, frame in shown(figure)] == list(range(12))
    figure.savefig(tmp_path / "a.png")
    with pytest.raises(UserError, match="fp16 gives no window scores"):
        compare([made(scores=None, method_name="fp16")] * 2)


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/a\.png cannot be written"):
        made().save(tmp_path / "file" / "a.png")
    with pytest.raises(UserError, match=r"a\.gif does not end in \.png, \.svg or \.pdf"):
        made().save(tmp_path / "a.gif")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


def test_bytes_are_told_in_the_unit_that_suits_them() -> None:
    assert [size(n) for n in (999, 1000, 185_600, 2.5e6, 3e9)] == ["999 bytes", "1 kB", "186 kB", "2.5 MB", "3 GB"]
