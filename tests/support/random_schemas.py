"""Random JSON schemas of what grammars know, each with values that come to an end."""

from __future__ import annotations

import random
from typing import Any

_PATTERNS = [
    "^[a-z]{2,6}$",
    "^[A-Z][a-z]{1,8}( [A-Z][a-z]{1,8})?$",
    "^(yes|no|maybe)$",
    r"^\+?[0-9]{3,9}$",
    "^#[0-9a-f]{6}$",
]
_FORMATS = ["date", "uuid", "ipv4"]
_WORDS = ["name", "age", "city", "tags", "ok", "größe", "unit price", 'quo"te', "id", "next", "x", "y"]


def random_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """A schema, most often of an object."""
    make = _object if depth == 3 and rng.random() < 0.8 else _any
    schema = make(rng, depth)
    if rng.random() < 0.15:
        schema = {"$defs": {"part": _any(rng, 1), "whole": schema}, "$ref": "#/$defs/whole"}
        if "properties" in schema["$defs"]["whole"]:
            schema["$defs"]["whole"]["properties"]["part"] = {"$ref": "#/$defs/part"}
    if rng.random() < 0.1:
        schema = {"title": "Something", "description": "said of it", **schema}
    return schema


def _any(rng: random.Random, depth: int) -> dict[str, Any]:
    makers = [_string, _string, _integer, _number, _constant, _enum, _boolean, _nullable]
    makers += [_object, _object, _array, _array, _tuple, _union, _both] if depth > 0 else []
    return rng.choice(makers)(rng, depth - 1)


def _string(rng: random.Random, _: int) -> dict[str, Any]:
    match rng.randrange(3):
        case 0:
            least = rng.randint(0, 4)
            return {"type": "string", "minLength": least, "maxLength": least + rng.randint(1, 24)}
        case 1:
            return {"type": "string", "pattern": rng.choice(_PATTERNS)}
        case _:
            return {"type": "string", "format": rng.choice(_FORMATS)}


def _integer(rng: random.Random, _: int) -> dict[str, Any]:
    least = rng.randint(-1000, 1000)
    schema: dict[str, Any] = {"type": "integer", "minimum": least, "maximum": least + rng.randint(0, 5000)}
    if rng.random() < 0.2:
        schema = {"type": "integer", "minimum": 0, "exclusiveMaximum": 1000, "multipleOf": rng.choice([2, 5, 7])}
    return schema


def _number(rng: random.Random, _: int) -> dict[str, Any]:
    """Of few digits: without a step a model may go on with digits for ever."""
    return {
        "type": "number",
        "minimum": 0,
        "maximum": rng.choice([1, 10.5, 1000]),
        "multipleOf": 0.25,
    }


def _constant(rng: random.Random, _: int) -> dict[str, Any]:
    return {"const": rng.choice([0, -1.5, "a constant", True, None, ["x", 1], {"k": "ü"}])}


def _enum(rng: random.Random, _: int) -> dict[str, Any]:
    return {"enum": rng.sample(["red", "green", "blue", 'a "quoted" one', 1, 2, None, "日本"], rng.randint(1, 5))}


def _boolean(_rng: random.Random, _: int) -> dict[str, Any]:
    return {"type": "boolean"}


def _nullable(_rng: random.Random, _: int) -> dict[str, Any]:
    return {"type": ["integer", "null"], "minimum": 0, "maximum": 99}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(_WORDS, rng.randint(0, 4))
    return {
        "type": "object",
        "properties": {name: _any(rng, depth) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
        "additionalProperties": False,
    }


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randint(0, 2)
    return {"type": "array", "items": _any(rng, depth), "minItems": least, "maxItems": least + rng.randint(0, 2)}


def _tuple(rng: random.Random, depth: int) -> dict[str, Any]:
    parts = [_any(rng, depth) for _ in range(rng.randint(1, 3))]
    return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}


def _union(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_any(rng, depth) for _ in range(rng.randint(2, 3))]}


def _both(rng: random.Random, _: int) -> dict[str, Any]:
    least = rng.randint(0, 50)
    return {"allOf": [{"type": "integer", "minimum": least}, {"maximum": least + 60}]}
