"""Errors of the simulator."""

from __future__ import annotations


class SimulatorError(Exception):
    """Missing or invalid input of a simulation. The message says what to do."""
