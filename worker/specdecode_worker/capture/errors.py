"""Errors of capture.

CaptureError
├── HookNotFound       the redaction hook cannot be imported
└── FolderUnusable     the folder of segments cannot be created, written or read
"""


class CaptureError(Exception):
    """Base of errors that prevent capture from starting. The message names the remedy."""


class HookNotFound(CaptureError):
    """The redaction hook cannot be imported."""


class FolderUnusable(CaptureError):
    """The folder of segments cannot be created, written or read."""
