"""Measuring a model once on a few prompts, and keeping what was found in files that are refused where they do not fit.

`origin` says of which weights and prompts a file tells; `states` shows queries, keys and values to whoever measures;
`statistics` is what SmoothQuant and SKVQ are calibrated with. Layer sensitivities are in `windowquant.calibration`.
"""
