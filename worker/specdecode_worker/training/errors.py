"""What can go wrong in training and evaluation.

TrainingError
├── PromptFileError    a file of prompts or of text cannot be used
├── ResumeMismatch     a checkpoint or a cache was made by other settings
└── CannotContinue     a draft that exists cannot be trained on
"""


class TrainingError(Exception):
    """The run cannot go on; the message says what to do."""


class PromptFileError(TrainingError):
    """A file of prompts or of text cannot be used; the message names its line."""


class ResumeMismatch(TrainingError):
    """What lies in the output folder was made by other settings."""


class CannotContinue(TrainingError):
    """A draft that exists cannot be trained on; the message names what stands in the way."""
