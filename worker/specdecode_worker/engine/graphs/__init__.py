"""Decode steps captured as CUDA graphs: draft, verify, accept and commit over static tensors."""
