"""Status of a deployment as a pure function of what was observed, decided and applied."""

from specdecode_operator.controller.status.build import failed_status, status_of
from specdecode_operator.controller.status.text import rounded

__all__ = ["failed_status", "rounded", "status_of"]
