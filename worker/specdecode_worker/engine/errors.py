"""What can go wrong between the server and the engine process.

EngineError
├── EngineGone     the process crashed or was killed; nothing more will come
├── CallRefused    the engine did not take a plan, a draft or knobs; what was in force stays
└── RankLost       a rank of a replica on several devices ended, or does not answer
"""


class EngineError(Exception):
    """Base of all errors of this package."""


class EngineGone(EngineError):
    """The engine process crashed or was killed; the message holds its last words."""


class CallRefused(EngineError):
    """The engine did not take a plan, a draft or knobs; what was in force stays."""


class RankLost(EngineError):
    """A rank of a replica on several devices ended, or does not answer; the message holds its last words."""
