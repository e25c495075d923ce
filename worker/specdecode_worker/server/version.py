"""The version of this program, as its wheel says."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("specdecode")
except PackageNotFoundError:  # run from a source tree
    VERSION = "0+unknown"
