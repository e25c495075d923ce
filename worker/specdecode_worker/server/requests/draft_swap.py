"""Request body of PUT /v1/draft on the admin port, which replaces a draft."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from specdecode_worker.contract import DRAFT_FREE, DraftConfig, Method, Written


class NewDraft(Written):
    """New draft, and the name of the draft that it replaces. ``method`` defaults to a head in EAGLE-3's format."""

    method: Method = "eagle3"
    uri: str | None = None
    name: str = Field(default="", pattern=r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?)?$", max_length=32)
    """Name of the draft to replace; empty for the default draft."""

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if (self.uri is None) != (self.method in DRAFT_FREE):
            raise ValueError(f"method {self.method} {'needs a' if self.uri is None else 'takes no'} uri")
        return self

    def config(self) -> DraftConfig:
        """Return the configuration of the draft, as a required draft: one that does not fit the target is an error."""
        return DraftConfig(method=self.method, uri=self.uri, required=True)
