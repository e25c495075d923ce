"""Assigned drafts: the worker follows the assignment of its plan and runs the trial of a candidate."""
