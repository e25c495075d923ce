"""Task of a request, by the rules of the plan, as a worker reads them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specdecode_worker.contract import belongs
from specdecode_worker.contract.internal_stream import PlanTask


def task_of(
    tasks: Sequence[PlanTask], header: str | None, body: Mapping[str, Any], tenant: str = ""
) -> PlanTask | None:
    """Return the task of a request: from the header, else the metadata, else the first rule that holds for it.

    The worker searches the prompt as its template renders it. This function searches the messages alone, so a rule
    that matches a part of the template is missed here; the request is then placed as one without a task.
    """
    by_name = {task.name: task for task in tasks}
    if header is not None:
        return by_name.get(header)
    metadata = body.get("metadata")
    label = metadata.get("task") if isinstance(metadata, Mapping) else None
    if isinstance(label, str) and label in by_name:
        return by_name[label]
    texts = list(_texts(body)) if any(task.match for task in tasks) else []
    return next((task for task in tasks if belongs(task.match, task.clients, texts, tenant)), None)


def _texts(body: Mapping[str, Any]) -> Iterator[str]:
    """Yield the texts of the prompt or of the messages."""
    messages = body.get("messages")
    parts = [one.get("content") for one in messages if isinstance(one, Mapping)] if isinstance(messages, list) else []
    for part in [body.get("prompt"), *parts]:
        if isinstance(part, str):
            yield part
        elif isinstance(part, list):
            for one in part:
                text = one.get("text") if isinstance(one, Mapping) else one
                if isinstance(text, str):
                    yield text
