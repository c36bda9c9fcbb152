"""What `scripts/perplexity.py` does with its configuration."""

import hashlib
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from hydra import compose
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from windowquant.calibrate.everything import statistics_beside
from windowquant.calibrate.statistics import measure_statistics
from windowquant.errors import UserError
from windowquant.harness.files import write_json, write_text
from windowquant.harness.machine import describe
from windowquant.harness.methods import build_method
from windowquant.harness.perplexity import corpus, pretrained
from windowquant.harness.perplexity.result import compared, row, to_markdown
from windowquant.harness.perplexity.score import read
from windowquant.harness.perplexity.span import span_of_text
from windowquant.harness.settings import check_count, digest, resolve_device
from windowquant.method import Method

COUNTS = ("context", "scored", "chunk", "documents", "calibration", "window_size")


@dataclass(frozen=True)
class Ask:
    """One row: a method of `conf/method`, with its hyper-parameters as composed."""

    name: str
    params: dict[str, Any]

    @property
    def key(self) -> str:
        """What tells rows apart."""
        return _key(self.name, self.params)

    def build(self, calibration: str | None = None) -> Method:
        """The method; `calibration`: the file beside which its statistics lie, if it needs any."""
        return build_method(self.name, self.params, calibration)


@dataclass(frozen=True)
class Reader:
    """A loaded model, and the documents [T] that every method reads, all in the same way."""

    model: PreTrainedModel
    documents: Sequence[Tensor]
    context: int
    chunk: int

    def row(self, ask: Ask, calibration: str | None, seen: Callable[[], object] = lambda: None) -> dict[str, Any]:
        """One method's row; `seen` is called after each document."""
        method, readings = ask.build(calibration), []
        with span_of_text(self.model, self.context), method.bind(self.model) as bound:
            for document in self.documents:
                readings.append(read(bound, document, self.context, self.chunk))
                seen()
        return row(ask.name, method, ask.params, readings)


def asks(entries: Sequence[str], window_size: int) -> list[Ask]:
    """Methods from names in `conf/method`, each with overrides of its own if any: "kivi v_bits=8".

    Must be called while Hydra is initialised on `conf/`. Raises UserError for a method that cannot be.
    """
    found = []
    for entry in entries:
        name, *overrides = entry.split()
        own = [f"method.{override}" for override in overrides]
        cfg = compose("run", [f"method={name}", f"model.window_size={window_size}", *own])
        values: dict[str, Any] = OmegaConf.to_container(cfg.method, resolve=True)  # type: ignore[assignment]
        ask = Ask(values.pop("name"), values)
        ask.build()
        found.append(ask)
    return found


def calibrated(model: PreTrainedModel, prompts: Sequence[Tensor], context: int, folder: Path) -> str:
    """Measure the statistics that SmoothQuant and SKVQ need; the path that `Ask.build` takes."""
    path = folder / "calibration.json"
    with span_of_text(model, context):
        samples = ({"input_ids": prompt[None].to(model.device)} for prompt in prompts)
        measure_statistics(model, samples).save(statistics_beside(path))
    return str(path)


def perplexity_command(cfg: DictConfig) -> None:
    """Read the documents through every method, and write `<output>/perplexity/<name>.json` and `.md`.

    The record grows method by method; a row that an earlier run with the same setting wrote is kept.

    Raises:
        UserError: something is missing or cannot be.
    """
    for name in COUNTS:
        check_count(name, cfg[name])
    wanted, device = asks(list(cfg.methods), cfg.window_size), resolve_device(cfg.device)
    path = Path(cfg.gguf) if cfg.gguf else pretrained.packaged_gguf()
    text = corpus.text_file(Path(cfg.text)) if cfg.text else corpus.packaged_text()
    model, tokenizer = pretrained.load_gguf(path, device)
    scored, spare = _parts(corpus.tokenized(tokenizer, text), cfg)
    setting = _setting(cfg, path, text, scored)
    target = Path(cfg.output) / "perplexity" / f"{cfg.name}.json"
    rows = {} if cfg.force else _known_rows(target, setting)
    reader, missing = Reader(model, scored, cfg.context, cfg.chunk), [ask for ask in wanted if ask.key not in rows]
    if not missing:
        _write(target, setting, [rows[ask.key] for ask in wanted], device)
    with tempfile.TemporaryDirectory() as folder, tqdm(total=len(missing) * len(scored), unit="document") as bar:
        calibration = calibrated(model, spare, cfg.context, Path(folder)) if missing else None
        for ask in missing:
            bar.set_description(ask.name)
            rows[ask.key] = reader.row(ask, calibration, bar.update)
            _write(target, setting, [rows[each.key] for each in wanted if each.key in rows], device)
    print(target.with_suffix(".md").read_text(encoding="utf-8"))
    print(f"{target}, {target.with_suffix('.md')}")


def _parts(tokens: Sequence[int], cfg: DictConfig) -> tuple[list[Tensor], list[Tensor]]:
    """Documents to score, from the first seven eighths of the text, and to calibrate on, from the last."""
    cut = len(tokens) * 7 // 8
    scored = corpus.documents(tokens[:cut], cfg.context + 1 + cfg.scored, cfg.documents)
    return scored, corpus.documents(tokens[cut:], cfg.context, cfg.calibration)


def _setting(cfg: DictConfig, path: Path, text: corpus.Corpus, scored: Sequence[Tensor]) -> dict[str, Any]:
    """What decides the numbers of every row."""
    hashed = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**20):
            hashed.update(block)
    return {
        "model": {"name": path.stem, "sha256": hashed.hexdigest(), "dtype": "float32"},
        "text": {"source": text.source, "tokens": digest([document.tolist() for document in scored])},
        **{name: cfg[name] for name in COUNTS},
    }


def _key(name: str, params: dict[str, Any]) -> str:
    return digest([name, params])


def _known_rows(target: Path, setting: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Rows of an earlier record with the same setting, by method and hyper-parameters."""
    if not target.is_file():
        return {}
    try:
        record = json.loads(target.read_text(encoding="utf-8"))
        same = record["setting"] == setting
        return {_key(each["method"], each["params"]): each for each in record["rows"] if same}
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise UserError(f"{target} is not a perplexity record: delete it, or give another name=<name>.") from error


def _write(target: Path, setting: dict[str, Any], rows: list[dict[str, Any]], device: torch.device) -> None:
    """The record, and the table beside it."""
    record = {
        "setting": setting,
        "file": target.name,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe(device),
        "rows": compared(rows),
    }
    write_json(target, record)
    write_text(target.with_suffix(".md"), to_markdown(record))
