"""Compact text of a section: tables by column, numbers at six digits, then zlib and base64. Pure.

A section of at most READABLE_BYTES stays plain JSON: ``{"version": 1, ...}``. A longer one becomes
``{"version": 1, "encoding": "zlib", "data": "..."}``, and ``base64 -d | zlib-flate -uncompress`` (or Python) shows its
JSON. In there, a list of records with the same fields is a table: ``{"rows": n, "columns": {field: values}}``.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import zlib
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

READABLE_BYTES = 2048
"""Longest section that stays plain JSON. A trade: a person can read a screen of it, and a thousand deployments at rest
have little more."""
MAX_CONTENT_BYTES = 16 * 1024 * 1024
"""Longest decompressed section, against data that expands without end."""
DIGITS = 6
"""Significant digits of estimates, as planning rounds them. Fewer would lose variances, which are small differences
of large sums."""

Json = dict[str, Any]


def encode(version: int, content: Json) -> str:
    """Return the text of a section. Equal content gives equal text."""
    plain = _text({"version": version, **content})
    if len(plain.encode()) <= READABLE_BYTES:
        return plain
    packed = _text({name: _table(value) if _is_table(value) else value for name, value in content.items()})
    data = base64.b64encode(_compressed(packed.encode())).decode()
    return _text({"version": version, "encoding": "zlib", "data": data})


def decode(text: str) -> tuple[int, Json]:
    """Return version and content of a section.

    Raises:
        ValueError: The text is not a section.
    """
    document = json.loads(text)
    if not isinstance(document, dict) or not isinstance(document.get("version"), int):
        raise ValueError("a section is a valid JSON object with a version")
    version = document.pop("version")
    encoding = document.pop("encoding", None)
    if encoding is None:
        return version, document
    if encoding != "zlib":
        raise ValueError(f"the encoding {encoding!r} is not valid here")
    content = json.loads(_decompressed(document.get("data", "")))
    try:
        return version, {name: _records(value) if _is_packed_table(value) else value for name, value in content.items()}
    except (AttributeError, KeyError, IndexError, StopIteration, TypeError) as error:
        raise ValueError(f"a table is not valid: {type(error).__name__} {error}") from error


def rounded(value: float) -> float:
    """Return ``value`` at DIGITS significant digits."""
    return float(f"{value:.{DIGITS}g}")


def _compressed(content: bytes) -> bytes:
    """Return ``content`` for zlib. Z_FILTERED leaves out matches of 3 to 5 characters, which among random digits cost
    more than they save: 14 % less on estimates of 8 tasks."""
    compressor = zlib.compressobj(9, strategy=zlib.Z_FILTERED)
    return compressor.compress(content) + compressor.flush()


def _decompressed(data: str) -> bytes:
    expander = zlib.decompressobj()
    try:
        content = expander.decompress(base64.b64decode(data, validate=True), MAX_CONTENT_BYTES)
    except (binascii.Error, zlib.error, TypeError) as error:
        raise ValueError(f"the data is not valid: {error}") from error
    if not expander.eof:
        raise ValueError("the data is not valid: it is cut off or too long")
    return content


def _text(document: Any) -> str:
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False)


# --- tables -------------------------------------------------------------------------------------------------------


def _is_table(value: Any) -> bool:
    """Return whether ``value`` is a list of at least two records with the same fields."""
    if not isinstance(value, list) or len(value) < 2 or not all(isinstance(item, dict) for item in value):
        return False
    return all(item.keys() == value[0].keys() for item in value)


def _is_packed_table(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {"rows", "columns"}


def _table(records: Sequence[Json]) -> Json:
    return {
        "rows": len(records),
        "columns": {name: _column([record[name] for record in records]) for name in records[0]},
    }


def _records(table: Json) -> list[Json]:
    columns = {name: _values(column) for name, column in table["columns"].items()}
    if any(len(column) != table["rows"] for column in columns.values()):
        raise ValueError("the columns of a valid table have the same length")
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _column(values: list[Any]) -> Any:
    """Return a column in its shortest form: lists of scalars position by position, numbers by their digits."""
    if all(_is_number(value) for value in values):
        return _digits(values)
    if not all(_is_flat(value) for value in values):
        return values
    longest = max(map(len, values))
    items = [[value[index] for value in values if index < len(value)] for index in range(longest)]
    return {"lengths": [len(value) for value in values], "items": [_column(item) for item in items]}


def _is_flat(value: Any) -> bool:
    return isinstance(value, list) and not any(isinstance(item, list | dict) for item in value)


def _values(column: Any) -> list[Any]:
    if isinstance(column, list):
        return column
    if "digits" in column:
        return _numbers(column)
    items = [iter(_values(position)) for position in column["items"]]
    return [[next(items[index]) for index in range(length)] for length in column["lengths"]]


# --- numbers ------------------------------------------------------------------------------------------------------


def _is_number(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value)


def _digits(values: list[float]) -> Json | list[float]:
    """Return numbers as decimal exponents and digits: the first digit of all numbers, then the second of all, ...

    Numbers of one column resemble each other in their exponent and their first digits (times above all), and equal
    characters in a row compress to almost nothing.
    """
    numbers = [Decimal(repr(value)).as_tuple() for value in values]
    if not values or len(set(values)) == 1:
        return values
    width = max(len(number.digits) for number in numbers)
    rows = [(*number.digits, *[0] * (width - len(number.digits))) for number in numbers]
    return {
        "digits": "".join(str(digit) for position in zip(*rows, strict=True) for digit in position),
        "exponents": [int(number.exponent) + len(number.digits) for number in numbers],
        "negative": [index for index, number in enumerate(numbers) if number.sign],
    }


def _numbers(column: Json) -> list[float]:
    exponents, digits = column["exponents"], column["digits"]
    count = len(exponents)
    numbers = [float(f"0.{digits[index::count]}e{exponent}") for index, exponent in enumerate(exponents)]
    for index in column["negative"]:
        numbers[index] = -numbers[index]
    return numbers
