"""JSON schemas of the request bodies, derived from the pydantic models that validate them.

Rules that the models do not contain are added: null values, and the fields of `requests.unsupported_fields`.
"""

from __future__ import annotations

from typing import Any

from specdecode_worker.server.requests.base import MAX_ID, RequestModel
from specdecode_worker.server.requests.unsupported_fields import NEUTRAL, WITHOUT_EFFECT

Json = dict[str, Any]
_NULL: Json = {"type": "null"}
PREFIX = "#/components/schemas/"


def schemas_of(*kinds: type[RequestModel]) -> Json:
    """Return the schemas of ``kinds``, and of all models to which they refer, by name."""
    schemas: Json = {}
    for kind in kinds:
        schema = kind.model_json_schema(ref_template=PREFIX + "{model}")
        schemas |= schema.pop("$defs", {})
        schemas[kind.__name__] = _whole(schema)
    return schemas


def _whole(schema: Json) -> Json:
    """Complete the schema of a body: optional fields accept null, and unsupported fields accept neutral values."""
    required = schema.get("required", [])
    properties = {
        name: one if name in required else _or_null(one) for name, one in schema.get("properties", {}).items()
    }
    for name, values in NEUTRAL.items():
        properties.setdefault(name, {"enum": [*values, None], "description": "accepted with its neutral values only"})
    for name in sorted(WITHOUT_EFFECT):
        properties.setdefault(name, {"description": "accepted without effect"})
    return {**schema, "properties": properties}


def with_model_bounds(schema: Any, vocab_size: int, max_model_len: int) -> Any:
    """Return ``schema`` with the bounds of the served model: the largest token id and the largest max_tokens."""
    if isinstance(schema, list):
        return [with_model_bounds(one, vocab_size, max_model_len) for one in schema]
    if not isinstance(schema, dict):
        return schema
    bounded = {key: with_model_bounds(one, vocab_size, max_model_len) for key, one in schema.items()}
    if bounded.get("maximum") == MAX_ID:
        bounded["maximum"] = vocab_size - 1
    for name in ("max_tokens", "max_completion_tokens"):
        for one in bounded.get(name, {}).get("anyOf", ()):
            if one.get("type") == "integer":
                one["maximum"] = max_model_len - 1
    return bounded


def _or_null(schema: Json) -> Json:
    """Return a schema that also accepts null. The default stays at the top level of the schema."""
    inner = {key: value for key, value in schema.items() if key not in ("default", "title")}
    default = {key: value for key, value in schema.items() if key == "default" and value is not None}
    options = inner["anyOf"] if inner.keys() == {"anyOf"} else [inner]
    return {"anyOf": [*(one for one in options if one != _NULL), _NULL], **default}
