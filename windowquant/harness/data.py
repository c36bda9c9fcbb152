"""Where a benchmark's tables and videos come from."""

import hashlib
import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from windowquant.errors import UserError
from windowquant.harness.settings import DataSettings
from windowquant.mini.data import ensure

DATA_KINDS = ("mini", "hub", "local")


@dataclass(frozen=True)
class Data:
    """A data source. `root` is what lmms-eval gets as `HF_HOME`: videos in the benchmarks' own folders, and each
    benchmark's table as a saved `DatasetDict` in `datasets/<task>`; None for data that lmms-eval downloads itself."""

    name: str
    root: Path | None

    def table(self, task: str) -> Path | None:
        """Folder of a task's table, None where lmms-eval downloads it.

        Raises:
            UserError: the folder is not there.
        """
        if self.root is None:
            return None
        folder = self.root / "datasets" / task
        if not (folder / "dataset_dict.json").is_file():
            raise UserError(f"Table {folder} is missing: save the DatasetDict there, or choose another data folder.")
        return folder

    def fingerprint(self, task: str) -> str:
        """Identity of a task's data: the generator's own fingerprint, or a hash over the table's files."""
        table = self.table(task)
        if table is None:
            return "hub"
        manifest = self.root / "manifest.json" if self.root else table
        if manifest.is_file():
            return str(json.loads(manifest.read_text())["fingerprint"])[:16]
        return _hash_files(str(table))


def open_data(settings: DataSettings) -> Data:
    """The data source that a configuration names; the embedded data are generated on first use.

    Raises:
        UserError: unknown kind, or a local folder that is not there.
    """
    if settings.name not in DATA_KINDS:
        raise UserError(f"Unknown data '{settings.name}': the known ones are {', '.join(DATA_KINDS)}.")
    if settings.name == "hub":
        return Data("hub", None)
    if settings.name == "mini":
        return Data("mini", _generated(settings.root))
    if settings.root is None:
        raise UserError("data=local needs a folder: add data.root=<folder with the benchmarks' videos and datasets/>.")
    root = Path(settings.root).expanduser().resolve()
    if not root.is_dir():
        raise UserError(f"Data folder {root} does not exist: check data.root.")
    return Data("local", root)


@lru_cache(maxsize=4)
def _generated(root: str | None) -> Path:
    return ensure(root)


@lru_cache(maxsize=16)
def _hash_files(folder: str) -> str:
    total = hashlib.sha256()
    for path in sorted(Path(folder).rglob("*.arrow")):
        total.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return total.hexdigest()[:16]
