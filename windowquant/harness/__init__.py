"""Evaluation: lmms-eval plug-in and tasks, measurement, run records, and the Hydra commands around them."""
