"""`describe`: list the scenes of a mini video in order, an answer of some fifty tokens that all read the cache."""
