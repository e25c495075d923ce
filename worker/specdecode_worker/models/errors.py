"""What can be wrong with a model that a user named.

ModelError
├── ConfigMismatch    config.json lacks a field, or holds a value that is not supported
└── WeightMismatch    a tensor is missing, extra, misshapen or of the wrong kind
"""


class ModelError(Exception):
    """The model cannot be served; the message names the file and what to do."""


class ConfigMismatch(ModelError):
    """config.json lacks a field or holds a value that is not supported."""


class WeightMismatch(ModelError):
    """A tensor is missing, extra or misshapen; the message names it."""
