"""Runs of traces with policies, their scores, tables and plots."""
