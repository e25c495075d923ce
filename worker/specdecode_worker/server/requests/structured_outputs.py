"""Request fields that prescribe the format of the answer."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, GetJsonSchemaHandler
from pydantic_core import CoreSchema

from specdecode_worker.server.errors import BadRequest
from specdecode_worker.server.requests.base import RequestModel

MAX_CHOICE_TEXTS = 1024
MAX_SCHEMA_NAME = 64
REGEX, GRAMMAR = "rust-regex", "lark-grammar"
"""Format names, in the OpenAPI document, of regular expressions and grammars."""


class TextFormat(RequestModel):
    """Any text, the default."""

    type: Literal["text"]


class JsonObjectFormat(RequestModel):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchema(RequestModel):
    """JSON schema with a name, which is part of no prompt."""

    name: str = Field(min_length=1, max_length=MAX_SCHEMA_NAME)
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None
    """True refuses keywords that a grammar cannot express. Otherwise they are ignored."""


class JsonSchemaFormat(RequestModel):
    """JSON that a schema allows."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]

_KINDS = ("json", "regex", "choice", "grammar", "json_object")


class StructuredOutputs(RequestModel):
    """Grammar of the answer, as in vLLM: exactly one of the first five fields is set."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    """JSON schema, as an object or as its text."""
    regex: str | None = Field(default=None, min_length=1)
    choice: list[Annotated[str, Field(min_length=1)]] | None = Field(
        default=None, min_length=1, max_length=MAX_CHOICE_TEXTS
    )
    grammar: str | None = Field(default=None, min_length=1)
    """Context-free grammar in Lark's or GBNF's notation."""
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    """Allow no white space between JSON tokens."""

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Return one schema per kind of grammar, because one flat object cannot express that exactly one is set."""
        fields = handler.resolve_ref_schema(handler(core_schema))["properties"]
        space = "disable_any_whitespace"
        text = {"type": "string", "minLength": 1}
        kinds = {
            "json": {"type": "object"},
            "regex": {**text, "format": REGEX},
            "choice": {"type": "array", "minItems": 1, "maxItems": MAX_CHOICE_TEXTS, "items": text},
            "grammar": {**text, "format": GRAMMAR},
            "json_object": {"const": True},
        }
        return {
            "oneOf": [
                {
                    "type": "object",
                    "required": [kind],
                    "properties": {kind: schema, space: fields[space]},
                    "additionalProperties": False,
                }
                for kind, schema in kinds.items()
            ]
        }

    def check(self) -> None:
        """Raise BadRequest unless exactly one kind of grammar is set."""
        values = (self.json_, self.regex, self.choice, self.grammar, self.json_object or None)
        count = sum(value is not None for value in values)
        if count != 1:
            raise BadRequest(
                f"structured_outputs needs exactly one of {', '.join(_KINDS)}, and has {count}",
                param="structured_outputs",
                code="invalid_value",
            )
