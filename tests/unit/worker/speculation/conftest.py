"""Hypothesis profile for these tests.

It sets no deadline, because a busy machine must not make a test fail.
"""

from __future__ import annotations
