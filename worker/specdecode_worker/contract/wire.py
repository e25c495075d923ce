"""Base classes, limits and shared types of the contract between operator and worker."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

CONTRACT_VERSION = 1
"""Version of the documents that this package writes.

A new optional field keeps the version: readers ignore it. So does a new value of a field with fixed ones, which only
workers write whose configuration names it. A change of the meaning, the name or the type of a field raises it by one.
"""
SUPPORTED_CONTRACT_VERSIONS = range(max(1, CONTRACT_VERSION - 2), CONTRACT_VERSION + 2)
"""Versions of reports that the operator reads: the last three, and one newer than its own.

Workers may be one version newer while an upgrade of the operator is rolled back; their unknown fields are ignored.
"""
MAX_NODES = 63
"""Nodes of the largest tree: with the root they fit one 64-bit ancestor mask."""
MAX_DEPTH = 16
"""Depth of the deepest node of a tree whose acceptance is counted."""
MAX_RANKS = 8
"""Acceptance is counted for ranks 0..7 of the draft's candidates. A higher rank counts as a miss."""
MAX_TASKS = 8
MAX_CLIENTS = 64
"""Largest number of clients that a task names."""
MAX_PREFILL_WORKERS = 256
MAX_MERGED = 2
"""Most drafts that are merged with the draft of a task."""
OTHER_TASK = "other"
MAX_REPORT_BYTES = 64 * 1024

DraftMethod = Literal["eagle3", "peagle", "dflash", "eagle", "draft-model", "medusa", "ngram", "suffix"]
Method = Literal[DraftMethod, "none"]
Sampler = Literal["coupled", "mss"]
"""Acceptance of draft tokens.

``coupled`` uses coupled noise, which gives the text of plain decoding. ``mss`` is multi-round sampling, which gives the
distribution of plain decoding.
"""
ToolFormat = Literal["hermes", "llama3_json", "pythonic"]
"""Format of a model's tool calls, by vLLM's names of the parsers."""
ReasoningFormat = Literal["deepseek_r1", "qwen3"]
"""How a model marks its thinking, by vLLM's names of the parsers."""
Mode = Literal["Off", "Static", "Advisory", "Auto"]
Dtype = Literal["float32", "bfloat16"]
TargetQuantization = Literal["fp8", "int8"]
KVCacheDtype = Literal["auto", "fp8"]
DraftQuantization = Literal["int4", "int8", "fp8"]
"""Weight-only quantization (vLLM's key ``quantization``). int4: four bits for MLPs, eight for lm_head."""
Placement = Literal["shared", "own"]
"""Device of a draft: ``shared`` is that of the target (of rank 0), ``own`` another one, in a process of its own."""
TaskName = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=32)]


class Received(BaseModel):
    """Base of documents that a program wrote. Unknown fields come from a newer writer and are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class Written(BaseModel):
    """Base of documents that a person may have written. An unknown field is an error and is refused by name."""

    model_config = ConfigDict(extra="forbid", frozen=True)
