"""Parser of request bodies: JSON to a validated request, or a BadRequest that names the field at fault."""

from __future__ import annotations

from typing import Any, TypeVar

import pydantic_core
from pydantic import BaseModel, ValidationError

from specdecode_worker.server.errors import BadRequest
from specdecode_worker.server.requests.base import RequestModel
from specdecode_worker.server.requests.unsupported_fields import drop_neutral_fields

Request = TypeVar("Request", bound=RequestModel)
Model = TypeVar("Model", bound=BaseModel)


def parse(kind: type[Request], body: bytes) -> Request:
    """Parse and validate a JSON request body. Raises BadRequest that names the field at fault."""
    return build(kind, read_object(body))


def build(kind: type[Request], fields: dict[str, Any]) -> Request:
    """Validate the fields of a request. Raises BadRequest that names the field at fault."""
    try:
        request = kind.model_validate(drop_neutral_fields(fields, kind.model_fields))
    except ValidationError as error:
        raise bad_request(error) from None
    request.check()
    return request


def parse_contract(kind: type[Model], body: bytes) -> Model:
    """Parse and validate a model of the package `contract`. Raises BadRequest that names the field at fault."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise bad_request(error) from None


def read_object(body: bytes) -> dict[str, Any]:
    """Parse a JSON object. Raises BadRequest for invalid JSON or another type."""
    try:
        parsed = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise BadRequest(f"the body is no JSON: {error}", code="invalid_json") from None
    if not isinstance(parsed, dict):
        raise BadRequest("the body must be a JSON object", code="invalid_json")
    return parsed


def bad_request(error: ValidationError) -> BadRequest:
    """Convert the first validation error of pydantic into an error with OpenAI's codes."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    param = _path(first["loc"])
    if first["type"] == "extra_forbidden":
        return BadRequest(f"unrecognized field: {param}", param=param, code="unknown_parameter")
    if first["type"] == "missing":
        return BadRequest(f"missing required field: {param}", param=param, code="missing_required_parameter")
    message = first["msg"].removeprefix("Value error, ")
    return BadRequest(f"invalid {param}: {message}" if param else message, param=param or None, code="invalid_value")


def _path(location: tuple[int | str, ...]) -> str:
    """Format an error location: ("messages", 0, "content") becomes "messages[0].content"."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text
