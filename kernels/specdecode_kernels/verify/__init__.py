"""Verification of draft trees: the path that the target accepts and the bonus token after it."""
