"""The method itself: tensors in, tensors out. Imports torch only; knows no model, no cache and no file."""
