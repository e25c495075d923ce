"""Trials of the statistics of drafts in simulated traffic: the canary test and the drift detector."""
