"""Attention of packed tokens over a paged prefix and their own tree. The mathematics is in README.md."""
