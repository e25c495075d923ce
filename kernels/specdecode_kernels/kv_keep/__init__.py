"""Compaction of accepted tree nodes: their keys and values move next to the committed prefix."""
