"""The CPU backend: attention over packed codes in explicit vector code, compiled by Numba on first use.

`emit` writes LLVM vector instructions, `tiles` the inner products of 32 tokens with a few query rows, `loop` the pass
over all tokens with an online softmax, `table` what the loop knows of a layer, `attention` the entry.
"""
