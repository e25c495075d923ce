"""Continuous batching of speculative steps over a paged cache."""
