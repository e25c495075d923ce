"""Statistics and life cycle of drafts: drift, the worth of a distillation run, the canary test, and its states.

Everything here is pure: no I/O, no clock, no randomness.
"""
