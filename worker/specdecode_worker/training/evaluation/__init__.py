"""Measure drafts: acceptance, calibration, time per token and the verdict on a candidate."""
