"""Errors of the operator. Foreign errors are translated once: in kube/api_errors.py and telemetry/worker_client.py.

OperatorError
|-- SettingsError          an environment variable of the operator makes no sense; the process does not start
|-- SpecError              the resource asks for what cannot be; retried only when it changes
|-- NotLeader              another replica of the operator may be the leader; nothing was written
|-- ClusterError           the API server did not do what it was asked
|   |-- NotFound           404: the object, or its kind, is not there
|   |-- Conflict           409: another client was faster, or owns the field
|   |-- Gone               410: the resource version is too old to watch from; list again
|   |-- Refused            400, 403, 422: asking again will not help by itself
|   |-- EvictionBlocked    429 of an eviction: a disruption budget does not allow it now
|   `-- Unavailable        5xx, 429, no connection: asking again will
|-- PluginError            kubectl specdecode cannot do what it was asked
`-- WorkerError            a worker's admin port
    |-- WorkerUnreachable  no answer: no connection, or it broke
    |   `-- WorkerTimeout  no complete answer within the deadline
    |-- Unauthorized       401 to every admin token
    `-- BadReport          an answer that is no report; names what is wrong with it
"""

from __future__ import annotations


class OperatorError(Exception):
    """Base of everything that this package raises on purpose."""


class SettingsError(OperatorError):
    """A setting of the operator itself; says which variable and what it may be."""


class SpecError(OperatorError):
    """What the user wrote cannot be done; the message says what to change."""


class NotLeader(OperatorError):
    """Write that was not sent, because this process is not certain to hold the Lease."""


class ClusterError(OperatorError):
    """The API server refused or failed.

    Attributes:
        sentence: The API server's own sentence, without the request that the message starts with.
    """

    def __init__(self, message: str = "", sentence: str = "") -> None:
        super().__init__(message)
        self.sentence = sentence or message


class NotFound(ClusterError):
    """The object is not there (any more)."""


class Conflict(ClusterError):
    """Name or field that another client holds."""


class Gone(ClusterError):
    """Resource version or continue token that is too old; only a new list helps."""


class Refused(ClusterError):
    """The request itself is not acceptable: invalid, or not allowed by RBAC or a quota."""


class EvictionBlocked(ClusterError):
    """Eviction that a disruption budget does not allow now; the message names the budget."""


class Unavailable(ClusterError):
    """The API server is away or overloaded."""


class PluginError(OperatorError):
    """No cluster, no such kind or object, not allowed; the message says what to do."""


class WorkerError(OperatorError):
    """One worker's admin port; never a reason to fail a reconcile."""


class WorkerUnreachable(WorkerError):
    """No answer: no connection, or one that broke."""


class WorkerTimeout(WorkerUnreachable):
    """No complete answer within the deadline."""


class Unauthorized(WorkerError):
    """Status 401 to every admin token that the operator has for the worker."""


class BadReport(WorkerError):
    """An answer that cannot be used; the message names the field."""
