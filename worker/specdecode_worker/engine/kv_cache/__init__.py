"""Paged KV cache: block ownership, prefix reuse and commit of accepted keys."""
