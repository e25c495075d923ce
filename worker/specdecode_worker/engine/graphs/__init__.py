"""Whole decode steps, captured once and replayed: draft, verify, accept and keep over static tensors."""
