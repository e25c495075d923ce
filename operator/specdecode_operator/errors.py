"""Errors of the operator. Foreign errors are translated once: in kube/client.py and telemetry/polling.py.

OperatorError
|-- SettingsError          an environment variable of the operator is invalid; the process does not start
|-- SpecError              the spec of a resource cannot be carried out; retried only when it changes
|-- NotLeader              another replica of the operator may be the leader; nothing was written
|-- ClusterError           a request to the API server failed
|   |-- NotFound           404: the object or its kind does not exist
|   |-- Conflict           409: another client changed the object first, or owns the field
|   |-- Gone               410: the resource version is too old to watch from; list again
|   |-- Refused            400, 403, 422: the same request fails again until something changes
|   |-- EvictionBlocked    429 of an eviction: a disruption budget does not allow it now
|   `-- Unavailable        5xx, 429, no connection: a retry may succeed
|-- PluginError            kubectl specdecode cannot carry out its command
`-- WorkerError            a request to a worker's admin port failed
    |-- WorkerUnreachable  no connection, or it broke before the answer was complete
    |   `-- WorkerTimeout  no complete answer within the deadline
    |-- Unauthorized       401 to every admin token
    `-- BadReport          the answer is not a valid report; the message says why
"""

from __future__ import annotations


class OperatorError(Exception):
    """Base class of all errors that this package raises."""


class SettingsError(OperatorError):
    """Invalid setting of the operator. The message names the variable and its valid values."""


class SpecError(OperatorError):
    """Spec of a user that cannot be carried out. The message says what to change."""


class NotLeader(OperatorError):
    """Write that was not sent, because this process is not certain to hold the Lease."""


class ClusterError(OperatorError):
    """Failed request to the API server.

    Attributes:
        sentence: Message of the API server. The message of the exception has the request before it.
    """

    def __init__(self, message: str = "", sentence: str = "") -> None:
        super().__init__(message)
        self.sentence = sentence or message


class NotFound(ClusterError):
    """Object that does not exist, or does not exist any more."""


class Conflict(ClusterError):
    """Name or field that another client holds."""


class Gone(ClusterError):
    """Resource version or continue token that is too old; only a new list helps."""


class Refused(ClusterError):
    """Request that is invalid, or not allowed by RBAC or a quota."""


class EvictionBlocked(ClusterError):
    """Eviction that a disruption budget does not allow now; the message names the budget."""


class Unavailable(ClusterError):
    """API server that cannot be reached or is overloaded."""


class PluginError(OperatorError):
    """Failed command of the kubectl plugin. The message says what to do."""


class WorkerError(OperatorError):
    """Failed request to the admin port of one worker. It never fails a reconcile."""


class WorkerUnreachable(WorkerError):
    """Worker without an answer: no connection, or a broken one."""


class WorkerTimeout(WorkerUnreachable):
    """No complete answer within the deadline."""


class Unauthorized(WorkerError):
    """Worker that answers 401 to all admin tokens of the operator."""


class BadReport(WorkerError):
    """Answer of a worker that is not a valid report. The message names the field."""
