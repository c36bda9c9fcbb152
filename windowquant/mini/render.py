"""Draws the mini world: masks of the contents, backgrounds of the places, frames of a story.

Frames are composed at any side length that is a multiple of 64; what a class looks like varies with a seed, so that
held-out drawings exist
(for the handwritten numbers: held-out samples of scikit-learn's copy of the UCI set).
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
from PIL import Image, ImageDraw

from windowquant.mini.scenes import ACTIONS, CONTENTS, MIN_SCENE_FRAMES, NUMBERS, OBJECTS, PLACES, Story

SIDE = 64
SPRITE = 40
CANVAS = 160

# (top colour, bottom colour, texture) of each place, 0..1
_LOOKS: dict[str, tuple[tuple[float, float, float], tuple[float, float, float], str]] = {
    "sea": ((0.20, 0.35, 0.85), (0.05, 0.15, 0.70), "waves"),
    "forest": ((0.10, 0.50, 0.15), (0.05, 0.35, 0.10), "trunks"),
    "desert": ((0.95, 0.75, 0.35), (0.90, 0.55, 0.15), "waves"),
    "snow": ((0.85, 0.88, 0.95), (0.95, 0.95, 0.98), "dots"),
    "space": ((0.03, 0.03, 0.20), (0.05, 0.05, 0.35), "dots"),
    "lawn": ((0.55, 0.85, 0.30), (0.45, 0.80, 0.15), "trunks"),
    "street": ((0.55, 0.55, 0.58), (0.35, 0.35, 0.38), "bricks"),
    "barn": ((0.50, 0.28, 0.12), (0.40, 0.22, 0.08), "trunks"),
    "beach": ((0.90, 0.85, 0.25), (0.80, 0.75, 0.15), "dots"),
    "garden": ((0.95, 0.60, 0.70), (0.85, 0.45, 0.60), "dots"),
    "lake": ((0.15, 0.75, 0.78), (0.05, 0.60, 0.65), "waves"),
    "cave": ((0.35, 0.05, 0.10), (0.25, 0.03, 0.08), "bricks"),
    "market": ((0.95, 0.50, 0.10), (0.85, 0.38, 0.05), "bricks"),
    "library": ((0.60, 0.15, 0.70), (0.45, 0.10, 0.55), "trunks"),
    "temple": ((0.85, 0.12, 0.12), (0.70, 0.08, 0.08), "bricks"),
    "swamp": ((0.45, 0.47, 0.12), (0.35, 0.37, 0.08), "waves"),
}  # fmt: skip
assert tuple(_LOOKS) == PLACES

# joints of a stick figure in units of the figure's height: hip at the origin, y down.
# the torso runs from hip to neck
_POSES: dict[str, tuple[tuple[float, float], ...]] = {
    # neck, head, left and right hand
    # left and right knee, left and right foot
    "wave": (
        (0, -0.32), (0, -0.45), (-0.14, -0.02), (0.24, -0.55),
        (-0.06, 0.2), (0.06, 0.2), (-0.08, 0.45), (0.08, 0.45),
    ),
    "cheer": (
        (0, -0.3), (0, -0.43), (-0.26, -0.58), (0.26, -0.58),
        (-0.14, 0.2), (0.14, 0.2), (-0.24, 0.45), (0.24, 0.45),
    ),
    "sit": (
        (-0.1, -0.3), (-0.1, -0.43), (0.2, -0.1), (0.18, -0.05),
        (0.28, 0), (0.26, 0.03), (0.3, 0.32), (0.26, 0.32),
    ),
    "sleep": (
        (-0.34, 0.2), (-0.48, 0.2), (-0.1, 0.3), (-0.12, 0.32),
        (0.22, 0.2), (0.22, 0.25), (0.48, 0.22), (0.48, 0.28),
    ),
    "run": (
        (0.1, -0.3), (0.15, -0.43), (-0.22, -0.12), (0.32, -0.16),
        (0.2, 0.12), (-0.1, 0.2), (0.12, 0.38), (-0.38, 0.3),
    ),
    "bow": (
        (0.3, -0.1), (0.42, -0.02), (0.3, 0.2), (0.34, 0.22),
        (0, 0.22), (0.02, 0.22), (0, 0.45), (0.04, 0.45),
    ),
    "balance": (
        (0, -0.3), (0, -0.43), (-0.42, -0.24), (0.42, -0.24),
        (0, 0.22), (0.16, 0.1), (0, 0.45), (0.02, 0.24),
    ),
    "tumble": (
        (0, 0.26), (0, 0.38), (-0.2, 0.45), (0.2, 0.45),
        (-0.1, -0.2), (0.1, -0.2), (-0.22, -0.42), (0.22, -0.42),
    ),
}  # fmt: skip
assert tuple(_POSES) == ACTIONS


@dataclass(frozen=True)
class Drawings:
    """Which drawings may be used: the seed range of the procedural ones and the rows of the handwritten digits."""

    held_out: bool

    def rng(self, seed: int) -> np.random.Generator:
        return np.random.default_rng([int(self.held_out), seed])


@cache
def _digits(held_out: bool) -> dict[int, np.ndarray]:
    from sklearn.datasets import load_digits

    data = load_digits()
    mine = (np.arange(len(data.images)) % 5 == 0) == held_out
    return {d: (data.images[mine & (data.target == d)] / 16.0).astype(np.float32) for d in range(10)}


def _figure(action: str, rng: np.random.Generator, phase: float) -> Image.Image:
    """A stick figure; its hands and feet swing a little with the phase (0..1)."""
    image = Image.new("L", (CANVAS, CANVAS))
    draw = ImageDraw.Draw(image)
    size, flip = CANVAS * rng.uniform(0.72, 0.88), rng.choice([-1.0, 1.0])
    joints = np.array(_POSES[action]) + rng.normal(0, 0.015, (8, 2))
    swing = 0.06 * np.sin(2 * np.pi * phase)
    joints[[2, 3, 6, 7]] += swing * np.array([[1, 0.5], [-1, 0.5], [-0.5, 0], [0.5, 0]])
    points = np.array([CANVAS / 2, CANVAS / 2]) + joints * size * np.array([flip, 1.0])
    neck, head, hand_l, hand_r, knee_l, knee_r, foot_l, foot_r = map(tuple, points)
    hip, width = (CANVAS / 2, CANVAS / 2), int(rng.integers(10, 15))
    shoulder = tuple(np.array(neck) * 0.85 + np.array(hip) * 0.15)
    for path in ((hip, neck), (shoulder, hand_l), (shoulder, hand_r), (hip, knee_l, foot_l), (hip, knee_r, foot_r)):
        draw.line(path, fill=255, width=width, joint="curve")
    radius = size * 0.1
    draw.ellipse([head[0] - radius, head[1] - radius, head[0] + radius, head[1] + radius], fill=255)
    return image


def _object(name: str, rng: np.random.Generator, phase: float) -> Image.Image:
    """A solid object that turns a little with the phase."""
    image = Image.new("L", (CANVAS, CANVAS))
    draw = ImageDraw.Draw(image)
    r, c = CANVAS * rng.uniform(0.3, 0.4), CANVAS / 2
    box = [c - r, c - r, c + r, c + r]
    if name == "ball":
        draw.ellipse(box, fill=255)
    elif name == "ring":
        draw.ellipse(box, outline=255, width=int(r * rng.uniform(0.25, 0.4)))
    elif name == "box":
        draw.rectangle(box, fill=255)
    elif name == "star":
        angles = np.pi * (np.arange(10) / 5 - 0.5)
        radii = np.where(np.arange(10) % 2 == 0, r * 1.15, r * 0.45)
        draw.polygon([(c + q * np.cos(a), c + q * np.sin(a)) for q, a in zip(radii, angles, strict=True)], fill=255)
    elif name == "kite":
        draw.polygon(
            [(c, c - r * 1.2), (c + r * 0.6, c - r * 0.3), (c, c + r * 0.6), (c - r * 0.6, c - r * 0.3)], fill=255
        )
        draw.line([(c, c + r * 0.5), (c + r * 0.3, c + r * 0.8), (c - r * 0.2, c + r * 1.2)], fill=255, width=8)
    else:  # flag: a pole with a cloth
        draw.line([(c - r * 0.7, c - r * 1.1), (c - r * 0.7, c + r * 1.2)], fill=255, width=12)
        draw.polygon([(c - r * 0.7, c - r * 1.1), (c + r, c - r * 0.6), (c - r * 0.7, c)], fill=255)
    turn = rng.uniform(-10, 10) + 8 * np.sin(2 * np.pi * phase)
    return image.rotate(turn, resample=Image.Resampling.BILINEAR)


def _number(name: str, drawings: Drawings, rng: np.random.Generator) -> Image.Image:
    samples = _digits(drawings.held_out)[NUMBERS.index(name)]
    digit = Image.fromarray((samples[rng.integers(len(samples))] * 255).astype(np.uint8))
    side = int(CANVAS * rng.uniform(0.8, 1.0))
    # some 140 samples a number are few to learn from: in training they also come narrower
    width = side if drawings.held_out else int(side * rng.uniform(0.75, 1.0))
    digit = digit.resize((width, side), Image.Resampling.BICUBIC)
    digit = digit.rotate(rng.uniform(-12, 12), Image.Resampling.BILINEAR)
    image, (x, y) = Image.new("L", (CANVAS, CANVAS)), rng.integers(0, CANVAS - side + 1, 2)
    image.paste(digit, (int(x), int(y)))
    return image


def mask(content: str, drawings: Drawings, seed: int, phase: float = 0.0, scale: int = 1) -> np.ndarray:
    """[40*scale, 40*scale] float32 in 0..1: one drawing of a content. The same seed and another phase is the same
    drawing in motion."""
    rng = drawings.rng(seed)
    if content in ACTIONS:
        image = _figure(content, rng, phase)
    elif content in OBJECTS:
        image = _object(content, rng, phase)
    else:
        image = _number(content, drawings, rng)
    side = SPRITE * scale
    return np.asarray(image.resize((side, side), Image.Resampling.BOX), np.float32) / 255


@cache
def _texture(kind: str, side: int) -> np.ndarray:
    """[side, 2*side] float32, -1..1: the pattern of a place, twice as wide as a frame (the camera pans over it)."""
    y, x = np.mgrid[0:side, 0 : 2 * side] * (SIDE / side)
    if kind == "waves":
        return np.sin(y * 0.8 + 2 * np.sin(x * np.pi / 32)).astype(np.float32)
    if kind == "trunks":
        return np.sign(np.sin(x * np.pi / 8)).astype(np.float32)
    if kind == "bricks":
        shift = 8 * ((y // 8) % 2)
        return np.where((y % 8 < 1) | ((x + shift) % 16 < 1), -1.5, 0.3).astype(np.float32)
    spots = ((x + 5 * (y // 8)) % 12 - 6) ** 2 + (y % 8 - 4) ** 2
    return np.where(spots < 3, 1.5, -0.2).astype(np.float32)


def background(place: str, rng: np.random.Generator, side: int = SIDE, pan: int = 0) -> np.ndarray:
    """[3, side, side] float32 in 0..1; `rng` moves the colours a little, `pan` (pixels of a 64-pixel frame) the
    pattern."""
    top, bottom, kind = _LOOKS[place]
    jitter = rng.normal(0, 0.03, 3)
    fade = np.linspace(0, 1, side, dtype=np.float32)[None, :, None]
    base = (
        np.asarray(top, np.float32)[:, None, None] * (1 - fade) + np.asarray(bottom, np.float32)[:, None, None] * fade
    )
    start = (pan * side // SIDE) % side
    pattern = _texture(kind, side)[None, :, start : start + side]
    return base + jitter.astype(np.float32)[:, None, None] + 0.04 * pattern


def compose(back: np.ndarray, drawing: np.ndarray, x: int, y: int) -> np.ndarray:
    """The drawing on the background: white where the place is dark, black where it is bright."""
    ink = 0.05 if back.mean() > 0.6 else 1.0
    h, w = drawing.shape
    out = back.copy()
    out[:, y : y + h, x : x + w] = out[:, y : y + h, x : x + w] * (1 - drawing) + ink * drawing
    return np.clip(out, 0, 1)


def frames(story: Story, drawings: Drawings, seed: int, side: int = 256) -> np.ndarray:
    """[frames, side, side, 3] uint8: the story as a video. In each scene one drawing drifts over the place and moves
    its limbs."""
    scale, rng = side // SIDE, np.random.default_rng([int(drawings.held_out), seed, 7])
    out, room = np.empty((sum(story.lengths), side, side, 3), np.uint8), SIDE - SPRITE
    frame = iter(out)
    for scene, length in zip(story.scenes, story.lengths, strict=True):
        look, sprite = int(rng.integers(2**31)), int(rng.integers(2**31))
        start, end = rng.integers(0, room, 2), rng.integers(0, room, 2)
        pan = int(rng.integers(SIDE))
        for t in range(length):
            at = start + (end - start) * t / max(1, length - 1)
            if t % 2 == 0:
                back = background(scene.place, np.random.default_rng(look), side, pan + t // 2)
            if t == 0 or scene.content not in NUMBERS:  # a written number does not move its limbs
                drawing = mask(scene.content, drawings, sprite, phase=t / 8, scale=scale)
            picture = compose(back, drawing, int(at[0] * scale), int(at[1] * scale))
            next(frame)[:] = (picture.transpose(1, 2, 0) * 255).round()
    return out


def stills(place: str, content: str, drawings: Drawings, rng: np.random.Generator, count: int = 1) -> np.ndarray:
    """[count, 3, 64, 64] uint8: so many frames in a row as they could stand in a scene of a video."""
    sprite, phase = int(rng.integers(2**31)), float(rng.random())
    x, y = start = rng.integers(0, SIDE - SPRITE, 2)
    back = background(place, rng, SIDE, int(rng.integers(SIDE)))
    out = [compose(back, mask(content, drawings, sprite, phase), int(x), int(y))]
    if count > 1:
        drift = (rng.integers(0, SIDE - SPRITE, 2) - start) / rng.integers(MIN_SCENE_FRAMES, 4 * MIN_SCENE_FRAMES)
        for t in range(1, count):
            x, y = (start + drift * t).astype(int)
            out.append(compose(back, mask(content, drawings, sprite, phase + t / 8), int(x), int(y)))
    return (np.stack(out) * 255).round().astype(np.uint8)


__all__ = ["CONTENTS", "SIDE", "Drawings", "background", "compose", "frames", "mask", "stills"]
