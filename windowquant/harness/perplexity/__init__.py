"""Perplexity of a text-only language model through each method's really packed cache.

`span` lets methods that know of visual tokens work on text, `pretrained` finds a small real model, `corpus` cuts text
into documents, `score` reads a document through a bound method, `result` makes the record and the table.
"""
