"""Counters, timers and step costs for the worker report."""
