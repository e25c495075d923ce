"""What can go wrong in capturing.

CaptureError
├── HookNotFound       the redaction hook cannot be imported
└── FolderUnusable     the folder of segments cannot be made, written or read
"""


class CaptureError(Exception):
    """Capture cannot start; the message says what to change."""


class HookNotFound(CaptureError):
    """The redaction hook cannot be imported."""


class FolderUnusable(CaptureError):
    """The folder of segments cannot be made, written or read."""
