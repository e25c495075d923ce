"""Suspicion: after how much silence a worker gets a second attempt of its request on another worker."""

from __future__ import annotations
