"""Tests that start processes with torch of their own: ranks, drafts on another device, training, benchmarks."""

from __future__ import annotations
