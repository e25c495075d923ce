"""The base of every request model."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class Checked(BaseModel):
    """An unknown field is refused; the text "0.5" is no number, as with OpenAI."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    def check(self) -> None:
        """What one field cannot know of another. Raises BadRequest that names the field."""


MAX_ID = 2**31 - 1
"""Of any vocabulary; the one that is served has fewer."""
TokenId = Annotated[int, Field(ge=0, le=MAX_ID)]
