"""The arguments of a call that is written in Python."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from typing import Any

from microturn_client._answer_reader import MalformedError

_WORDS = {"true": True, "false": False, "null": None}


def keywords_as_json(text: str) -> str:
    """Python's keyword arguments as a JSON object.

    Raises:
        MalformedError: they are none, or no plain values.
    """
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        assert isinstance(call, ast.Call)
        if call.args:
            raise MalformedError
        return json.dumps(dict(_items(call)), ensure_ascii=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise MalformedError from None


def _items(call: ast.Call) -> Iterator[tuple[str, Any]]:
    for keyword in call.keywords:
        if keyword.arg is None:
            raise MalformedError
        yield keyword.arg, ast.literal_eval(_Words().visit(keyword.value))


class _Words(ast.NodeTransformer):
    """JSON's words among Python's values."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_WORDS[node.id]) if node.id in _WORDS else node
