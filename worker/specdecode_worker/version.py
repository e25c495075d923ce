"""Version of the program, read from the metadata of the installed package."""

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("specdecode")
except PackageNotFoundError:  # not installed: run from a source tree
    VERSION = "0+unknown"
