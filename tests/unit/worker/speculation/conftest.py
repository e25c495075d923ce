"""A busy machine is no failure of the code: hypothesis gets no deadline."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("patient", deadline=None, max_examples=40)
settings.load_profile("patient")
