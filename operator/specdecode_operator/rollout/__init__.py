"""Rollout of drafts: one function a phase, and the assignment that follows from the record. Pure."""
