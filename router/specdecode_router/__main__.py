"""Command line of the router."""

from __future__ import annotations


def main() -> int:
    """Run the command of the command line."""
    raise SystemExit("specdecode-router has no command yet")


if __name__ == "__main__":
    raise SystemExit(main())
