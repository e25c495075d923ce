"""What the admin port takes for a draft: which one, and the name of the one whose place it takes."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from specdecode_worker.contract import DRAFT_FREE, DraftConfig, Method, Written


class NewDraft(Written):
    """Body of PUT /v1/draft. ``method`` may be left out for a head in EAGLE-3's format."""

    method: Method = "eagle3"
    uri: str | None = None
    name: str = Field(default="", pattern=r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?)?$", max_length=32)
    """Of a further draft; empty is the first."""

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if (self.uri is None) != (self.method in DRAFT_FREE):
            raise ValueError(f"method {self.method} {'needs a' if self.uri is None else 'takes no'} uri")
        return self

    def config(self) -> DraftConfig:
        return DraftConfig(method=self.method, uri=self.uri, required=True)
