"""Fixtures of the training tests."""

from training_fixtures import conversations, head, target

__all__ = ["conversations", "head", "target"]
