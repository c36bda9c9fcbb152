"""Writes the held-out mini data sets to disk, where lmms-eval looks for them when HF_HOME is the folder.

    nextqa/NExTVideo/<video>.mp4      egoschema/videos/<video_idx>.mp4
    intentqa/Videos/<video_id>.mp4    describe/videos/<video>.mp4
    datasets/<task>                   the table (`datasets.load_from_disk`), split `test`
    <task>/evidence.json              for each row the frames that hold the answer
    manifest.json                     fingerprints, sizes, encoder

`python -m windowquant.mini.data` writes them if they are not there and prints where they are.
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import av
from filelock import FileLock
from platformdirs import user_cache_path
from tqdm import tqdm

from windowquant.errors import UserError
from windowquant.mini.corpus import FPS, GENERATOR_VERSION, SIDE, TASKS, Sizes, Table, Video, build, fingerprint
from windowquant.mini.render import Drawings, frames
from windowquant.mini.video import encoder, write_mp4

VIDEO_FOLDERS = {
    "nextqa": "nextqa/NExTVideo",
    "egoschema": "egoschema/videos",
    "intentqa": "intentqa/Videos",
    "describe": "describe/videos",
}
VIDEO_COLUMNS = {"nextqa": "video", "egoschema": "video_idx", "intentqa": "video_id", "describe": "video"}
MADE_BY = "windowquant.mini"
_WORKERS = 2  # drawing and encoding leave the interpreter's lock often enough for two threads to pay


def ensure(root: str | Path | None = None, seed: int = 0, sizes: Sizes | None = None) -> Path:
    """The folder with the generated data, written first where it is missing or made by another generator or seed.

    `root` defaults to $WINDOWQUANT_DATA, else to a folder of the user's cache named after the fingerprint. The folder
    appears whole or not at all. A folder that holds anything but data of this generator is refused (UserError).
    """
    corpus = build(seed, sizes)
    name = fingerprint(corpus)
    chosen = root or os.environ.get("WINDOWQUANT_DATA") or user_cache_path("windowquant") / f"mini-{name[:8]}"
    folder = Path(chosen).expanduser().absolute()
    if _fingerprint_in(folder) == name:
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(f".{folder.name}.lock")):
            if _fingerprint_in(folder) != name:
                _generate(corpus, folder, seed)
    except OSError as error:
        raise UserError(
            f"cannot write the generated data to {folder} ({error.strerror or error}); "
            "name a writable folder in WINDOWQUANT_DATA"
        ) from error
    return folder


def _fingerprint_in(folder: Path) -> str | None:
    """The fingerprint of the generated data in the folder; None where there is nothing yet."""
    manifest = folder / "manifest.json"
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return None
    try:
        content = json.loads(manifest.read_text())
        if content["made_by"] == MADE_BY:
            return str(content["fingerprint"])
    except (OSError, ValueError, TypeError, KeyError):
        pass
    raise UserError(f"{folder} holds something other than generated data; name an empty or new folder for them")


def _generate(corpus: dict[str, Table], folder: Path, seed: int) -> None:
    """Writes everything beside the folder, then renames; data of an older generator are replaced."""
    new, old = folder.with_name(f".{folder.name}.new"), folder.with_name(f".{folder.name}.old")
    for leftover in (new, old):
        shutil.rmtree(leftover, ignore_errors=True)
    new.mkdir()
    try:
        _write_videos(corpus, new)
        for task, table in corpus.items():
            _write_table(task, table, new)
        _write_json(new / "manifest.json", _manifest(corpus, seed))
        if folder.exists():
            folder.rename(old)
        new.rename(folder)
    finally:
        for leftover in (new, old):
            shutil.rmtree(leftover, ignore_errors=True)


def _write_videos(corpus: dict[str, Table], root: Path) -> None:
    """Draws each video once and links it into the folder of every task that asks about it."""
    places: dict[Video, list[Path]] = {}
    for task, table in corpus.items():
        folder = root / VIDEO_FOLDERS[task]
        folder.mkdir(parents=True)
        for video in table.videos:
            places.setdefault(video, []).append(folder / f"{video.name}.mp4")
    with ThreadPoolExecutor(_WORKERS) as pool:
        list(tqdm(pool.map(_write_video, places, places.values()), "generating videos", len(places), unit="video"))


def _write_video(video: Video, paths: Sequence[Path]) -> None:
    first, *others = paths
    write_mp4(frames(video.story, Drawings(held_out=True), video.seed, SIDE), first, FPS)
    for other in others:
        try:
            os.link(first, other)
        except OSError:  # a file system without hard links
            shutil.copyfile(first, other)


def _write_table(task: str, table: Table, root: Path) -> None:
    import datasets  # slow to import, and only needed here

    with _quiet(datasets):
        rows = datasets.Dataset.from_list(list(table.rows))
        datasets.DatasetDict({"test": rows}).save_to_disk(root / "datasets" / task)
    names = [str(row[VIDEO_COLUMNS[task]]) for row in table.rows]
    evidence = [{"video": v, "frames": f} for v, f in zip(names, table.evidence, strict=True)]
    _write_json(root / task / "evidence.json", evidence)


@contextmanager
def _quiet(datasets: Any) -> Iterator[None]:
    shown = not datasets.utils.are_progress_bars_disabled()
    datasets.utils.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.utils.enable_progress_bars()


def _manifest(corpus: dict[str, Table], seed: int) -> dict[str, Any]:
    return {
        "made_by": MADE_BY,
        "generator_version": GENERATOR_VERSION,
        "seed": seed,
        "fingerprint": fingerprint(corpus),
        "encoder": encoder(),
        "av": av.__version__,
        "tasks": {
            task: {
                "fingerprint": corpus[task].fingerprint(),
                "videos": len(corpus[task].videos),
                "questions": len(corpus[task].rows),
            }
            for task in TASKS
        },
    }


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m windowquant.mini.data",
        description="Writes the generated data sets if they are missing, and prints their folder.",
    )
    parser.add_argument("--root", help="folder to write to (default: $WINDOWQUANT_DATA, else the user's cache)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the held-out stories and questions (default 0)")
    arguments = parser.parse_args(argv)
    try:
        print(ensure(arguments.root, arguments.seed))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
