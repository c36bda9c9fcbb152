"""Draw one held-out video as a strip, a frame a scene: python scripts/show_mini.py [results/figures/mini_video.png]."""

import sys
from pathlib import Path

import numpy as np
from PIL import Image

from windowquant.mini.corpus import build
from windowquant.mini.render import Drawings, frames


def main(path: Path) -> None:
    video = build()["describe"].videos[0]
    pictures = frames(video.story, Drawings(held_out=True), video.seed, 128)
    middles = np.cumsum(video.story.lengths) - np.array(video.story.lengths) // 2
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.concatenate(list(pictures[middles]), axis=1)).save(path)
    print(f"{path}: {', '.join(map(str, video.story.scenes))}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "results/figures/mini_video.png"))
