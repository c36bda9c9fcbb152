"""The CPU backend: attention over packed codes in explicit vector code, compiled by Numba on first use.

From the bottom up: `emit` writes LLVM vector instructions, of which `primitives` and `tiles` are made, the latter the
inner products of 32 tokens with a few query rows, for the sizes and kinds of values in `kinds`; `steps` is what else a
tile needs; `loop` the pass over all tokens with an online softmax; `pieces` what comes before and after it; `job` and
`table` what they know of a call and of a layer; `threads` runs it, `compiled` compiles it and keeps the result;
`attention` is the entry. `quantize`, with `quantize_tiles`, packs windows.
"""
