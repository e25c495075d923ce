"""Sampling parameters of a batch, their application to logits, and the samplers that use them."""
