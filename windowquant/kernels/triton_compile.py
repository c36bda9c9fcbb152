"""Compiling the Triton kernels ahead of time, for a GPU that need not be there, and what a compiled kernel takes."""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from windowquant.errors import UserError
from windowquant.kernels.triton_common import INTERPRETED

CAPABILITIES = (80, 86, 90)
"""Compute capabilities: A100, consumer and workstation Ampere, H100 and H200."""


@dataclass(frozen=True)
class Launch:
    """A kernel as it is called: `values` are its arguments by name.

    A pointer is written as its type ("*fp16"; its address is a multiple of 16), a float as "fp32", an integer as one
    that it could be: as Triton does when it runs, 1 and multiples of 16 are compiled in, unless the kernel says not to.
    `tuned`: compile it in every configuration that tuning tries, not in the first one only.
    """

    kernel: Any
    shape: str
    values: dict[str, Any]
    tuned: bool = False


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes: registers a thread, bytes of shared memory, and bytes a thread of local memory.

    Local memory is where registers are spilled to.
    """

    registers: int
    shared: int
    spilled: int


def name_of(kernel: Any) -> str:
    """The kernel's name."""
    return str(kernel.base_fn.__name__)


def configs_of(launch: Launch) -> list[triton.Config]:
    """The configurations that tuning tries for this launch."""
    tuner = launch.kernel
    if not tuner.early_config_prune:
        return list(tuner.configs)
    return list(tuner.early_config_prune(tuner.configs, launch.values, **launch.values))


def _scalar(value: Any, alignable: bool) -> tuple[str, list[list[Any]] | None]:
    """The type of an argument, and what is known of it."""
    known = [["tt.divisibility", 16]]
    if isinstance(value, str):
        return value, known if value.startswith("*") else None
    return "i32", known if alignable and value % 16 == 0 else None


def _source(launch: Launch) -> ASTSource:
    """What Triton compiles for the launch."""
    function = launch.kernel.fn
    signature: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for parameter in function.params:
        value, place = launch.values[parameter.name], (parameter.num,)
        special = not parameter.do_not_specialize
        if parameter.is_constexpr or (special and value == 1):
            signature[parameter.name], constants[place] = "constexpr", value
            continue
        parts = [_scalar(part, special) for part in (value if isinstance(value, tuple) else (value,))]
        types = tuple(kind for kind, _ in parts)
        signature[parameter.name] = types if isinstance(value, tuple) else types[0]
        for i, (_, known) in enumerate(parts):
            if known:
                attributes[(*place, i) if isinstance(value, tuple) else place] = known
    return ASTSource(function, signature, constants, attributes)


def compile_launch(launch: Launch, config: triton.Config, capability: int) -> Resources:
    """Compile a launch with the warps and stages of `config` for a compute capability (90 is sm_90).

    Raises UserError under the interpreter, which compiles nothing.
    """
    if INTERPRETED:
        raise UserError("TRITON_INTERPRET is set, so kernels are interpreted, not compiled; unset it.")
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages, "maxnreg": config.maxnreg}
    made = triton.compile(_source(launch), target=GPUTarget("cuda", capability, 32), options=options)
    registers, spilled = _usage(made.asm["cubin"])
    return Resources(registers, int(made.metadata.shared), spilled)


def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers a thread, and bytes of its stack and local memory, of the one kernel in `cubin`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
        told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    used = {name: int(count) for name, count in re.findall(r"(REG|STACK|LOCAL):(\d+)", told)}
    return used["REG"], used["STACK"] + used["LOCAL"]
