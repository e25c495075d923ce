"""Counter-based noise: the same (seed, position, token) always draws the same number."""
