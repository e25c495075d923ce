"""Fixtures of the training tests."""

from support.training_fixtures import conversations, head, target

__all__ = ["conversations", "head", "target"]
