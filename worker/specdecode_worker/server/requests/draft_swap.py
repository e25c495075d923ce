"""Request body of PUT /v1/draft on the admin port, which replaces a draft."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from specdecode_worker.contract import (
    DRAFT_FREE,
    PLACEABLE,
    WITH_MLP,
    DraftConfig,
    DraftQuantization,
    Method,
    Placement,
    Written,
)


class NewDraft(Written):
    """New draft, and the name of the draft that it replaces. ``method`` defaults to a head in EAGLE-3's format."""

    method: Method = "eagle3"
    uri: str | None = Field(default=None, max_length=1024)
    name: str = Field(default="", pattern=r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?)?$", max_length=32)
    """Name of the draft to replace; empty for the default draft."""
    quantization: DraftQuantization | None = None
    """Quantization of the weights of its MLPs and lm_head. None leaves them in the target's dtype."""
    placement: Placement = "shared"
    """Device of the draft; ``own`` needs one that neither the target nor another process uses."""
    expected_hash: str | None = Field(default=None, min_length=1, max_length=64)
    """Hash that the files must have; with another one the swap is refused. None accepts any."""

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if (self.uri is None) != (self.method in DRAFT_FREE):
            raise ValueError(f"method {self.method} {'needs a' if self.uri is None else 'takes no'} uri")
        if self.quantization and self.method not in WITH_MLP:
            raise ValueError(f"quantization is for methods {', '.join(WITH_MLP)}; {self.method} has no MLP")
        if self.placement == "own" and self.method not in PLACEABLE:
            raise ValueError(f"placement own is for methods {', '.join(PLACEABLE)}, not for {self.method}")
        return self

    def config(self) -> DraftConfig:
        """Return the configuration of the draft, as a required draft: one that does not fit the target is an error."""
        return DraftConfig(
            method=self.method,
            uri=self.uri,
            required=True,
            quantization=self.quantization,
            placement=self.placement,
        )
