"""Stage 1: tower, projector and word embeddings together, so that a visual token points at the words for its place
and its content."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm
from transformers import LlavaOnevisionForConditionalGeneration, PreTrainedTokenizerFast

from windowquant.mini.build import PER_FRAME
from windowquant.mini.render import Drawings, still
from windowquant.mini.scenes import CONTENTS, PLACES

TEMPERATURE = 0.07


class Vision:
    """The tower's side of a model, and the words it is aligned with."""

    def __init__(self, model: LlavaOnevisionForConditionalGeneration, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tower, self.projector = model.model.vision_tower, model.model.multi_modal_projector
        self.embed = model.model.language_model.embed_tokens
        self.place_ids = torch.tensor([tokenizer.convert_tokens_to_ids(f"Ġ{w}") for w in PLACES])
        self.content_ids = torch.tensor([tokenizer.convert_tokens_to_ids(f"Ġ{w}") for w in CONTENTS])

    def parameters(self) -> dict[str, nn.Parameter]:
        named = {f"tower.{n}": p for n, p in self.tower.named_parameters()}
        named |= {f"projector.{n}": p for n, p in self.projector.named_parameters()}
        return named | {"embed": self.embed.weight}

    def features(self, pixels: Tensor) -> Tensor:
        """[n, 3, 64, 64] uint8 -> [n, 16, 128]: the tower's output, pixels normalised as the processor does."""
        return self.tower(pixel_values=pixels.float() / 127.5 - 1).last_hidden_state

    def frame_tokens(self, features: Tensor) -> Tensor:
        """[n, 16, 128] -> [n, 4, 192]: projector, then the class's own bilinear 2x2 pooling."""
        z = self.projector(features)
        side = int(z.shape[1] ** 0.5)
        z = F.interpolate(z.unflatten(1, (side, side)).permute(0, 3, 1, 2), size=[side // 2] * 2, mode="bilinear")
        return z.permute(0, 2, 3, 1).flatten(1, 2)

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


def still_pool(per: int, drawings: Drawings, seed: int) -> Tensor:
    """[places, contents, per, 3, 64, 64] uint8."""
    rng = np.random.default_rng([seed, int(drawings.held_out)])
    out = np.empty((len(PLACES), len(CONTENTS), per, 3, 64, 64), np.uint8)
    for p, place in enumerate(tqdm(PLACES, desc="drawing stills", leave=False)):
        for c, content in enumerate(CONTENTS):
            for k in range(per):
                out[p, c, k] = still(place, content, drawings, rng)
    return torch.from_numpy(out)


def labelled(pool: Tensor, n: int, rng: np.random.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """n random stills of a pool with a little sensor noise -> pixels, places, contents."""
    place, content, k = (torch.from_numpy(rng.integers(0, size, n)) for size in pool.shape[:3])
    pixels = pool[place, content, k].float()
    noise = torch.from_numpy(rng.normal(0, 4, pixels.shape).astype(np.float32))
    gain = torch.from_numpy(rng.uniform(0.93, 1.07, (n, 1, 1, 1)).astype(np.float32))
    return (pixels * gain + noise).clamp(0, 255), place, content


@torch.no_grad()
def accuracy(vision: Vision, pool: Tensor, n: int = 512) -> dict[str, float]:
    pixels, place, content = labelled(pool, n, np.random.default_rng(1))
    _, p, c = vision.alignment(vision.frame_tokens(vision.features(pixels)), place, content)
    return {"place": (p == place).float().mean().item(), "content": (c == content).float().mean().item()}


@torch.no_grad()
def frame_bank(vision: Vision, pool: Tensor) -> Tensor:
    """[places, contents, per, 4, 192]: the frozen tower's and projector's frame tokens, from which training videos
    are assembled."""
    flat = pool.flatten(0, 2)
    return torch.cat([vision.frame_tokens(vision.features(part)) for part in flat.split(512)]).unflatten(
        0, pool.shape[:3]
    )
