"""Rotary positions, and keys and values on their way into the paged cache."""
