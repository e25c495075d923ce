"""Command line of the operator."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.slow
def test_the_operator_starts_without_simulator_and_plots() -> None:
    code = """
import sys, specdecode_operator.__main__
sys.exit(bool({"matplotlib", "specdecode_simulator"} & set(sys.modules)))
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
