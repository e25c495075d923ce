"""Errors of capture.

CaptureError
├── HookNotFound       the redaction hook cannot be imported
├── FolderUnusable     the folder of segments cannot be created, written or read
├── SegmentNotFound    a folder has no finished segment of a name
└── PullFailed         no segments can be fetched from workers
"""


class CaptureError(Exception):
    """Base of errors of capture. The message names the remedy."""


class HookNotFound(CaptureError):
    """The redaction hook cannot be imported."""


class FolderUnusable(CaptureError):
    """The folder of segments cannot be created, written or read."""


class SegmentNotFound(CaptureError):
    """A folder has no finished segment of a name."""


class PullFailed(CaptureError):
    """No segments can be fetched from workers: no address, a wrong token or no space."""
