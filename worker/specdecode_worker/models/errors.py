"""What can be wrong with a model that a user named.

ModelError
├── ConfigMismatch      config.json lacks a field, or holds a value that is not supported
├── WeightMismatch      a tensor is missing, extra, misshapen or of the wrong kind
├── VocabularyMismatch  two models that should draft for each other do not read text as the same tokens
├── BadUri              the URI names no model
├── NotPresent          the URI is fine, but nothing complete is there
├── CannotServe         no room on the device, or a required draft that is not for the target; found before loading
└── PullFailed
    ├── AccessDenied      gated, private, or no such repository
    ├── NotOnHub          no such repository, revision or usable file
    ├── HubUnreachable    the hub cannot be reached, or keeps breaking off
    ├── HashMismatch      what came is not what the hub announced
    └── DiskFull          no room for the files
"""

from __future__ import annotations

from specdecode_worker.contract import CheckVerdict


class ModelError(Exception):
    """The model cannot be served; the message names the file and what to do."""


class ConfigMismatch(ModelError):
    """config.json lacks a field or holds a value that is not supported."""


class WeightMismatch(ModelError):
    """A tensor is missing, extra or misshapen; the message names it."""


class VocabularyMismatch(ModelError):
    """Target and draft model do not share a tokenizer; the message names the first token that differs."""


class BadUri(ModelError):
    """The URI names no model; the message shows the forms that there are."""


class NotPresent(ModelError):
    """Nothing complete is where the URI points; the message says how to get it."""


class CannotServe(ModelError):
    """Found before anything is loaded; the message is the arithmetic, or what of a required draft does not fit."""

    def __init__(self, verdict: CheckVerdict) -> None:
        draft = verdict.draft_problem or ""
        super().__init__(draft if verdict.fits else "\n".join((verdict.problem, *verdict.arithmetic)))
        self.verdict = verdict


class PullFailed(ModelError):
    """Base of what goes wrong while a model is fetched."""


class AccessDenied(PullFailed):
    """The hub refuses: gated, private, or no such repository."""


class NotOnHub(PullFailed):
    """The hub has no such repository or revision, or no file in it that can be used."""


class HubUnreachable(PullFailed):
    """The hub cannot be reached, or keeps breaking off."""


class HashMismatch(PullFailed):
    """What came is not what the hub announced."""


class DiskFull(PullFailed):
    """The files do not fit on the disk."""
