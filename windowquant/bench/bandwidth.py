"""How fast this machine copies, which is what the bytes that attention must read are measured by."""

from typing import Any

import torch

from windowquant.bench.timing import clock_for, interleaved, summary


def copy_bandwidth(device: torch.device, mebibytes: int = 1024, rounds: int = 7) -> dict[str, Any]:
    """Bytes per second, read and written counted both, of one tensor copied into another; median of `rounds`.

    The buffer is to be larger than the caches: what is smaller measures these.
    """
    source = torch.ones(mebibytes * 2**18, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    times = interleaved({"copy": lambda: target.copy_(source)}, rounds, clock_for(device))["copy"]
    moved = 2 * source.numel() * source.element_size()
    return {"mebibytes": mebibytes, "seconds": summary(times), "bytes_per_s": moved / summary(times)["median"]}
