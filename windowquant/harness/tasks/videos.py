"""Where the video of a document is."""

import os
from pathlib import Path

from windowquant.errors import UserError


def video_path(folder: str, name: object) -> str:
    """HF_HOME/<folder>/<name>.mp4 (or .MP4), with HF_HOME as it is now; UserError where neither is there."""
    home = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    for suffix in ("mp4", "MP4"):
        path = home / folder / f"{name}.{suffix}"
        if path.is_file():
            return str(path)
    raise UserError(
        f"Video {home / folder / str(name)}.mp4 is missing: put it there or set HF_HOME to the data folder."
    )
