"""Sizes and kinds of values that the compiled code is written for."""

import numpy as np
import torch
from numba import types

from windowquant.kernels.cpu.emit import LANES

TOKENS = 2 * LANES
"""Tokens in a tile."""

MAX_CHANNELS = 256
CHANNEL_STRIDE = MAX_CHANNELS + LANES
"""Floats from one row of queries or of outputs to the next; more than needed, so that rows do not share cache sets."""

CHUNK = 8
"""Tiles whose scores are kept together."""

AHEAD = 2
"""How many tiles ahead of their use codes and scales are fetched."""

TOKEN_STRIDE = CHUNK * TOKENS + LANES
"""Floats from one row of scores to the next."""

NUMPY_KINDS = {torch.float16: np.uint16, torch.bfloat16: np.int16, torch.float32: np.float32}
"""How values of a dtype are called here."""

KINDS = {types.uint16: "float16", types.int16: "bfloat16", types.float32: "float32"}
