"""Rollout of drafts: events of an observation move the stored life cycle, and the assignment follows from it. Pure."""
