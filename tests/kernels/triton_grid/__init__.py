"""Tests of the Triton kernels over a grid of shapes, on whatever `device` is.

Not collected by themselves: `tests/kernels/test_triton_interpreted.py` runs them on the CPU in Triton's interpreter,
which has to be chosen before triton is imported, and `tests/gpu` on a CUDA device.
"""
