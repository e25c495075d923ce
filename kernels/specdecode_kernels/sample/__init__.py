"""Sampling parameters applied to logits: penalties, temperature, min-p, top-k and top-p."""
