"""Simulated requests and what happens to a fleet over time."""
