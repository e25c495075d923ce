"""Request body of the admin route that deletes the captured requests of a user."""

from __future__ import annotations

from pydantic import Field

from specdecode_worker.contract import Written
from specdecode_worker.server.requests.common import User


class UserDeletion(Written):
    """User whose records are deleted: the value of the field ``user`` of the requests."""

    user: User = Field(min_length=1)
