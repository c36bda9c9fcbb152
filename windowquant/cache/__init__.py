"""The packed KV cache: storage behind transformers' `Cache` interface, and its count of bytes."""
