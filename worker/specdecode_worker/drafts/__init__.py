"""Drafting methods, the registry of the drafts that a worker serves, and their swaps."""
