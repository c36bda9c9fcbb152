"""Stage 1: what makes visual tokens of pixels, so that a visual token points at the words for its place and its
content; the word embeddings with it, unless they are another model's."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from windowquant.mini.architectures import Architecture
from windowquant.mini.render import SIDE, Drawings, stills
from windowquant.mini.scenes import CONTENTS, PLACES
from windowquant.mini.text_model import PER_FRAME

TEMPERATURE = 0.07


class Vision:
    """The tower's side of a model, and the words it is aligned with (trained with it, or given)."""

    def __init__(
        self,
        architecture: Architecture,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerFast,
        words_given: bool = False,
    ) -> None:
        self.architecture, self.model, self.words_given = architecture, model, words_given
        self.embed = model.model.language_model.embed_tokens
        self.place_ids = torch.tensor([tokenizer.convert_tokens_to_ids(f"Ġ{w}") for w in PLACES])
        self.content_ids = torch.tensor([tokenizer.convert_tokens_to_ids(f"Ġ{w}") for w in CONTENTS])

    def parameters(self) -> dict[str, nn.Parameter]:
        modules = self.architecture.vision(self.model)
        named = {f"{name}.{n}": p for name, module in modules.items() for n, p in module.named_parameters()}
        return named if self.words_given else named | {"embed": self.embed.weight}

    def frame_tokens(self, pixels: Tensor) -> Tensor:
        """[n, merged, 3, 64, 64], 0 to 255 -> [n, 4, 192]."""
        return self.architecture.frame_tokens(self.model, pixels)

    def alignment(self, z: Tensor, place: Tensor, content: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Cross-entropy of cosine / 0.07 against the words, asked of every token and of the frame's mean -> loss,
        predicted places, predicted contents."""
        words = F.normalize(self.embed(torch.cat([self.place_ids, self.content_ids])), dim=-1).T
        tokens, frame = F.normalize(z, dim=-1) @ words, F.normalize(z.mean(1), dim=-1) @ words
        n = len(self.place_ids)
        loss = z.new_zeros(())
        for target, part in ((place, slice(0, n)), (content, slice(n, None))):
            each = F.cross_entropy(tokens[..., part].flatten(0, 1) / TEMPERATURE, target.repeat_interleave(PER_FRAME))
            loss = loss + 0.5 * each + 0.5 * F.cross_entropy(frame[:, part] / TEMPERATURE, target)
        return loss, frame[:, :n].argmax(1), frame[:, n:].argmax(1)


def still_pool(per: int, drawings: Drawings, seed: int, merged: int = 1) -> Tensor:
    """[places, contents, per, merged, 3, 64, 64] uint8."""
    rng = np.random.default_rng([seed, int(drawings.held_out)])
    out = np.empty((len(PLACES), len(CONTENTS), per, merged, 3, SIDE, SIDE), np.uint8)
    for p, place in enumerate(tqdm(PLACES, desc="drawing stills", leave=False)):
        for c, content in enumerate(CONTENTS):
            for k in range(per):
                out[p, c, k] = stills(place, content, drawings, rng, merged)
    return torch.from_numpy(out)


def labelled(pool: Tensor, n: int, rng: np.random.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """n random stills of a pool with a little sensor noise -> pixels, places, contents."""
    place, content, k = (torch.from_numpy(rng.integers(0, size, n)) for size in pool.shape[:3])
    pixels = pool[place, content, k].float()
    noise = torch.from_numpy(rng.normal(0, 4, pixels.shape).astype(np.float32))
    gain = torch.from_numpy(rng.uniform(0.93, 1.07, (n, 1, 1, 1, 1)).astype(np.float32))
    return (pixels * gain + noise).clamp(0, 255), place, content


@torch.no_grad()
def accuracy(vision: Vision, pool: Tensor, n: int = 512) -> dict[str, float]:
    pixels, place, content = labelled(pool, n, np.random.default_rng(1))
    _, p, c = vision.alignment(vision.frame_tokens(pixels), place, content)
    return {"place": (p == place).float().mean().item(), "content": (c == content).float().mean().item()}


@torch.no_grad()
def frame_bank(vision: Vision, pool: Tensor) -> Tensor:
    """[places, contents, per, 4, 192]: the trained tower's visual tokens, from which training videos are assembled."""
    flat = pool.flatten(0, 2)
    return torch.cat([vision.frame_tokens(part) for part in flat.split(512)]).unflatten(0, pool.shape[:3])
