"""Exceptions of training and evaluation.

TrainingError
├── PromptFileError    a file of prompts or of text cannot be used
├── ResumeMismatch     a checkpoint or a cache was made with other settings
├── DraftNotTrainable  an existing draft cannot be trained further
├── PoisonedCapture    too much of the captured text is not the target's own
├── PublishFailed      the candidate cannot be written to the place where workers read it
└── TimeLimitReached   the run took longer than its limit
"""


class TrainingError(Exception):
    """Failure that ends the run; the message says what the user can do."""


class PromptFileError(TrainingError):
    """Unusable file of prompts or of text; the message names the line."""


class ResumeMismatch(TrainingError):
    """Checkpoint or data in the output folder that was made with other settings."""


class DraftNotTrainable(TrainingError):
    """Existing draft that cannot be trained further; the message names the reason."""


class PoisonedCapture(TrainingError):
    """Captured text of which the target does not reproduce too large a share."""


class TimeLimitReached(TrainingError):
    """Run that took longer than its limit, over all its restarts."""


class PublishFailed(TrainingError):
    """Place that a candidate cannot be published to; the message says what to change."""
