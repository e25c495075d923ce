"""Fixtures of the training tests."""

from support.training_fixtures import conversations, head, placement, target

__all__ = ["conversations", "head", "placement", "target"]
