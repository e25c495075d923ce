"""Errors between the server and the engine process.

EngineError
├── EngineGone     the engine process crashed or was killed; it sends no more results
├── CallRefused    the engine refused a plan, a draft or knobs; the previous ones stay in force
└── RankLost       a rank of a replica on several devices ended or does not answer
"""


class EngineError(Exception):
    """Base class of the errors of this package."""


class EngineGone(EngineError):
    """The engine process crashed or was killed; the message gives the reason."""


class CallRefused(EngineError):
    """The engine refused a plan, a draft or synthetic knobs; the previous ones stay in force."""


class RankLost(EngineError):
    """A rank of a replica on several devices ended or does not answer; the message gives the reason."""
