"""Accepted tree nodes move to their place behind the committed prefix."""
