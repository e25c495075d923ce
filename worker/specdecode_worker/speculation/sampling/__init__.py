"""Sampling parameters of a batch, applied to logits, and the samplers that use them."""
