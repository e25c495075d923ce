"""Bases and limits of everything that crosses the wall."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

CONTRACT_VERSION = 1
MAX_NODES = 63
"""Nodes of the largest tree: the root and its nodes fit one 64-bit ancestor mask."""
MAX_RANKS = 8
"""Acceptance is kept for ranks 0..7 of the draft's ordering; what lies beyond is a miss."""
MAX_TASKS = 8
OTHER_TASK = "other"
MAX_REPORT_BYTES = 64 * 1024

Method = Literal["eagle3", "eagle", "draft-model", "medusa", "ngram", "none"]
Sampler = Literal["coupled", "mss"]
"""How drafted tokens are accepted: coupled noise (the text of plain decoding), or multi-round sampling (its law)."""
ToolFormat = Literal["hermes", "llama3_json", "pythonic"]
"""How a model writes the calls of tools; vLLM's names of the parsers."""
Mode = Literal["Off", "Static", "Advisory", "Auto"]
Dtype = Literal["float32", "bfloat16"]
TargetQuantization = Literal["fp8", "int8"]
DraftQuantization = Literal["int4", "int8", "fp8"]
"""Of weights alone (vLLM's key ``quantization``). int4: four bits for MLPs, eight for the head."""
TaskName = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=32)]


class Received(BaseModel):
    """Base of what a program wrote: unknown fields come from a newer writer and are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class Written(BaseModel):
    """Base of what a person may have written: an unknown field is a mistake and is refused by name."""

    model_config = ConfigDict(extra="forbid", frozen=True)
