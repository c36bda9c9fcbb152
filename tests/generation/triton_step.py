"""The static step with the Triton kernels, in Triton's interpreter: run by `test_static_step` in its own process."""

import torch
from torch import Tensor

from tests.architectures import batch_inputs
from tests.generation.common import WINDOWQUANT, generate, loaded
from tests.generation.replay import Recorder
from windowquant.cache.packed_cache import PackedCache
from windowquant.core.packed import PackedLayer
from windowquant.method import get_method


def main(name: str = "llava_onevision", steps: int = 4) -> None:
    """A recorded step, replayed, gives the tokens of `generate`, and the launcher waits for nothing."""
    model, processor = loaded(name)
    inputs, _ = batch_inputs(name, processor)
    with get_method(**WINDOWQUANT, backend="triton").bind(model) as bound:
        want = generate(model, inputs, bound.new_cache(inputs), max_new_tokens=1 + steps).sequences[:, -1 - steps :]
        cache, recorder, launched = bound.new_cache(inputs), Recorder(), []
        assert isinstance(cache, PackedCache)
        attend = cache.request.attend

        def watched(q: Tensor, layer: PackedLayer, mask: Tensor | None, scaling: float) -> Tensor:
            launched.append(layer.order.shape)
            return Recorder().record(lambda: attend(q, layer, mask, scaling))

        tokens = [generate(model, inputs, cache, max_new_tokens=1).sequences[:, -1:]]
        cache.request.attend = watched
        step = bound.static_step(cache, steps)
        live = step._forward
        step._forward = lambda: recorder.replay() if recorder.calls else recorder.record(live)
        for _ in range(steps):
            tokens.append(step(tokens[-1]).argmax(-1, keepdim=True))
    assert torch.equal(torch.cat(tokens, 1), want)
    assert len(launched) == steps * len(cache.layers) and len(set(launched)) <= len(cache.layers)


if __name__ == "__main__":
    main()
