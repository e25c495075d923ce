"""Sampling parameters, their application to logits, and the laws by which drafts are accepted."""
