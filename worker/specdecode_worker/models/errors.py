"""Errors about a model that a user named.

ModelError
├── ConfigMismatch      config.json lacks a field or holds an unsupported value
├── WeightMismatch      a tensor is missing, extra, misshapen or of the wrong dtype
├── TokenizerProblem    the folder has no usable tokenizer or chat template
├── TemplateRefused     the chat template does not accept the messages
├── VocabularyMismatch  target and draft have different tokens, or a tokenizer cannot be read
├── BadUri              the URI does not name a model
├── NotPresent          the URI is valid, but there is no complete model at its location
├── CannotServe         too little device memory, or a required draft that does not fit the target; found before loading
└── PullFailed
    ├── AccessDenied      gated, private, or no such repository; no access to a bucket
    ├── NotOnHub          no such repository, revision, folder in a bucket or usable file
    ├── HubUnreachable    the hub or store cannot be reached, or transfers keep failing
    ├── HashMismatch      the downloaded bytes differ from those that the hub or store announced
    └── DiskFull          not enough disk space for the files
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the process that renders templates has little memory
    from specdecode_worker.contract import CheckVerdict


class ModelError(Exception):
    """Base of errors that prevent serving a model. The message names the file and the remedy."""


class ConfigMismatch(ModelError):
    """config.json lacks a field or holds an unsupported value."""


class WeightMismatch(ModelError):
    """A tensor is missing, extra, misshapen or of the wrong dtype. The message names it."""


class TokenizerProblem(ModelError):
    """The folder has no usable tokenizer or chat template. The message names the file."""


class TemplateRefused(ModelError):
    """The chat template does not accept the messages. The message has the template's reason."""


class VocabularyMismatch(ModelError):
    """Target and draft have different tokens, or a tokenizer cannot be read. The message says what to do."""


class BadUri(ModelError):
    """The URI does not name a model. The message shows the valid forms."""


class NotPresent(ModelError):
    """There is no complete model at the URI's location. The message says how to get it."""


class CannotServe(ModelError):
    """The check before loading failed.

    The message holds the memory arithmetic, or the reason why a required draft does not fit.
    """

    def __init__(self, verdict: CheckVerdict) -> None:
        draft = verdict.draft_problem or ""
        super().__init__(draft if verdict.fits else "\n".join((verdict.problem, *verdict.arithmetic)))
        self.verdict = verdict


class PullFailed(ModelError):
    """Base of errors while a model is downloaded."""


class AccessDenied(PullFailed):
    """The hub or store denies access: the repository is gated, private, or does not exist."""


class NotOnHub(PullFailed):
    """The hub or store has no such repository, revision or folder, or no usable file in it."""


class HubUnreachable(PullFailed):
    """The hub or store cannot be reached, or transfers keep failing."""


class HashMismatch(PullFailed):
    """The downloaded bytes differ from the hash or size that the hub or store announced."""


class DiskFull(PullFailed):
    """The files do not fit on the disk."""
