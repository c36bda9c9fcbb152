"""A packed or streaming cache in one safetensors file.

The header's entry "windowquant" is JSON: `format` (of this file), `version` (of the package), `origin` (model and
method), `prompt_sha256` (of the token ids), `pixels` (prints of what the prompt shows), `plan` (null for a method that
makes none), `content` (the layers, with the names of their tensors) and `sha256` (of all of it and of the tensors).
Format 1 knew packed caches only, and is read as well.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from windowquant.cache.fingerprint import pixel_prints
from windowquant.cache.origin import CacheOrigin
from windowquant.cache.request_cache import RequestCache
from windowquant.cache.tree import put_together, take_apart
from windowquant.core.plan import BitPlan
from windowquant.errors import UserError
from windowquant.models import Prompt
from windowquant.models.prompt import require_ids

if TYPE_CHECKING:
    from windowquant.bound import Bound

FORMAT = 2
_ENTRY = "windowquant"


@dataclass(frozen=True, eq=False)
class FixedPlan:
    """A plan that was searched before; see `Planner`. rows: what the cache's layers were told, [L]."""

    found: BitPlan | None
    rows: tuple[Any, ...]
    scores: list[Tensor] | None
    sensitivity: tuple[float, ...]
    search_s: float

    def row(self, layer: int) -> Any:
        """Bits of each window in `layer`."""
        return self.rows[layer]

    def observe(self, embeds: Tensor) -> None:
        """Nothing is left to learn."""

    def learn(self, layer: int, h_in: Tensor, h_out: Tensor, start: int) -> None:
        """Nothing is left to learn."""

    def plan(self) -> BitPlan | None:
        """The plan."""
        return self.found


def write(cache: RequestCache, path: str | os.PathLike[str]) -> None:
    """Write a cache; see `RequestCache.save`."""
    stats, prompt = cache.stats, cache.request.prompt
    content = {
        "layers": [layer.state() for layer in cache.layers],
        "prompt": prompt,
        "scores": stats.scores,
        "rows": cache.rows_per_layer(),
    }
    tensors: dict[str, Tensor] = {}
    tree = {key: take_apart(value, key, tensors) for key, value in content.items()}
    on_cpu = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    header: dict[str, Any] = {
        "format": FORMAT,
        "version": version("windowquant"),
        "origin": asdict(cache.origin()),
        "prompt_sha256": hashlib.sha256(prompt.input_ids.numpy().tobytes()).hexdigest(),
        "pixels": cache.pixels,
        "plan": None if stats.plan is None else asdict(stats.plan),
        "sensitivity": stats.sensitivity,
        "search_s": stats.search_s,
        "content": tree,
    }
    header = json.loads(json.dumps(header))
    target = Path(path)
    temporary = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    try:
        save_file(on_cpu, temporary, {_ENTRY: json.dumps({**header, "sha256": _digest(header, on_cpu)})})
        temporary.replace(target)
    except (OSError, SafetensorError) as error:
        raise UserError(f"The cache cannot be written to {target} ({error}).") from None
    finally:
        temporary.unlink(missing_ok=True)


def read(bound: "Bound", path: str | os.PathLike[str], inputs: Mapping[str, Any] | None) -> RequestCache:
    """Read what `write` wrote; see `Bound.load_cache`."""
    header, tensors = _open(path)
    _check_origin(CacheOrigin.from_json(header["origin"]), bound.origin, path)
    devices = [next(layer.parameters()).device for layer in bound.adapter.decoder_layers(bound.model)]

    def tensor(name: str) -> Tensor:
        kind, _, rest = name.partition(".")
        return tensors[name].to(devices[int(rest.split(".")[0])]) if kind == "layers" else tensors[name]

    found = {key: put_together(tree, tensor) for key, tree in header["content"].items()}
    if inputs is not None:
        _check_prompt(bound, found["prompt"], header["pixels"], inputs, path)
    plan = None if header["plan"] is None else put_together({"type": "BitPlan", **header["plan"]}, tensor)
    scores = None if found["scores"] is None else list(found["scores"])
    planner = FixedPlan(plan, found["rows"], scores, tuple(header["sensitivity"]), header["search_s"])
    cache = bound.cache_of(found["prompt"], planner, header["pixels"])
    for layer, state in zip(cache.layers, found["layers"], strict=True):
        layer.restore(state)
    return cache


def _open(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Header and tensors of a file of this format, unharmed; UserError for any other."""
    try:
        with safe_open(path, framework="pt") as file:
            entry = (file.metadata() or {}).get(_ENTRY)
            tensors = {name: file.get_tensor(name) for name in file.keys()} if entry else {}  # noqa: SIM118
        header = json.loads(entry) if entry else None
    except FileNotFoundError:
        raise UserError(f"There is no saved cache {path}; write one with cache.save(path).") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{path} is damaged or no safetensors file ({error}); save the cache again.") from None
    if header is None:
        raise UserError(f"{path} is a safetensors file but no saved cache; write one with cache.save(path).")
    if header.get("format", 0) > FORMAT:
        raise UserError(
            f"{path} was written by a newer windowquant ({header.get('version')}, format {header['format']} where this "
            f"one reads {FORMAT}); update windowquant, or save the cache again."
        )
    if header.pop("sha256", None) != _digest(header, tensors):
        raise UserError(f"{path} is damaged: its content does not match its checksum; save the cache again.")
    return header, tensors


def _digest(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """sha256 of the header (without this entry) and of every tensor."""
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _check_origin(saved: CacheOrigin, own: CacheOrigin, path: str | os.PathLike[str]) -> None:
    same_structure = saved.structure == own.structure
    if same_structure and saved.dtype != own.dtype:
        raise UserError(f"{path} was saved with the model in {saved.dtype} and it is in {own.dtype} now; load it so.")
    if not same_structure or not saved.same_weights(own):
        raise UserError(f"{path} was saved with another model ({saved.model}); load it with that one bound.")
    if saved.method != own.method:
        raise UserError(f"{path} was saved by {saved.method} and {own.method} is bound; bind the method that saved it.")


def _check_prompt(
    bound: "Bound", prompt: Prompt, pixels: Mapping[str, str], inputs: Mapping[str, Any], path: str | os.PathLike[str]
) -> None:
    ids, attended = require_ids(inputs)
    prints = pixel_prints(bound.adapter, inputs)
    video = slice(0, prompt.visual_end)
    same = (
        torch.equal(ids[:, video], prompt.input_ids[:, video])
        and torch.equal(attended[:, video], prompt.attended[:, video])
        and all(pixels.get(key, value) == value for key, value in prints.items())
    )
    if not same:
        raise UserError(f"{path} holds another prompt or video than these inputs; encode them, or load their own file.")
