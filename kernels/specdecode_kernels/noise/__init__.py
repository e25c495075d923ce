"""Counter-based noise: the same (seed, position, token) always yields the same number."""
