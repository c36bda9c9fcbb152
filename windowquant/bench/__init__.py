"""Benchmarks: how fast attention, decoding, packing and the search are next to what one would use instead."""
