"""Drafters that propose all depths of a tree in one pass."""
