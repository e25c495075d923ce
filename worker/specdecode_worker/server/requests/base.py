"""Base class and shared types of the request models."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class RequestModel(BaseModel):
    """Base of the request models. Unknown fields are refused, and "0.5" is not accepted as a number, as with OpenAI."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    def check(self) -> None:
        """Check constraints between several fields. Raises BadRequest that names the field at fault."""


MAX_ID = 2**31 - 1
"""Largest token id of any vocabulary. The served model has a lower bound, which is checked later."""
TokenId = Annotated[int, Field(ge=0, le=MAX_ID)]
