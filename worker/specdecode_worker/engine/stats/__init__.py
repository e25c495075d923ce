"""Counters, timers and step costs behind the worker report."""
