"""Attention of packed tokens over a paged prefix and their own draft tree (mathematics in README.md)."""
