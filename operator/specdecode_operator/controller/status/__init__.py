"""Status of a deployment as a pure function of what was observed, decided and applied."""

from specdecode_operator.controller.status.build import failed_status, status_of
from specdecode_operator.controller.status.conditions import rounded
