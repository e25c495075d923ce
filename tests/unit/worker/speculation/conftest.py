"""Hypothesis profile for these tests.

It sets no deadline, because a busy machine must not make a test fail.
"""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("patient", deadline=None, max_examples=40)
settings.load_profile("patient")
