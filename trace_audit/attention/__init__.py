"""Attention over the paged KV cache: one small protocol, one file a backend."""
