"""Reads the fields of a JSON object and refuses what does not belong there, naming the field."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from typing import Any

from microturn_gateway.failures import Refusal

_MISSING: Any = object()

_WITHOUT_MEANING_IN_A_PART = (
    *("cache_control", "prompt_cache_breakpoint"),  # what comes again is cached without being asked
    *("annotations", "logprobs", "parsed"),  # of an answer that is sent back
    "id",  # of a content block of LangChain
)


def parse_object(text: str | bytes) -> Mapping[str, Any]:
    """The JSON object of a message.

    Raises:
        Refusal: it is none.
    """
    raw = text if isinstance(text, bytes) else text.encode(errors="surrogatepass")
    try:
        value = json.loads(raw, parse_constant=_refuse, parse_float=_finite)
        if b"\\u" in raw:  # an escape can stand for half a character, which cannot be encoded again
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise Refusal("invalid_json", f"this is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise Refusal("invalid_json", "a JSON object belongs here")
    return value


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        _refuse(number)
    return value


class Fields:
    """The fields of one object, each read once; what is left at the end is unknown.

    Args:
        value: as it came.
        path: of the object within its message, for error messages.
        refused: gets what is wrong with a field, which then counts as absent and takes no other field with it; None
            raises it.

    Raises:
        Refusal: it is no object.
    """

    def __init__(self, value: object, path: str = "", refused: list[Refusal] | None = None) -> None:
        if not isinstance(value, Mapping):
            raise Refusal("invalid_type", f"'{path}' must be an object", param=path or None)
        self._rest: dict[str, Any] = dict(value)
        self._path = path
        self._refused = refused

    def path(self, name: str) -> str:
        """The path of a field."""
        return f"{self._path}.{name}" if self._path else name

    def refuse(self, code: str, message: str, name: str) -> None:
        """Refuses a field.

        Raises:
            Refusal: the field takes the others with it.
        """
        refusal = Refusal(code, message, param=self.path(name))
        if self._refused is None:
            raise refusal
        self._refused.append(refusal)

    def take(self, name: str, kind: type | tuple[type, ...], default: Any = _MISSING) -> Any:
        """A field of this type; null counts as absent.

        Raises:
            Refusal: it is of another type, or absent without a default.
        """
        value = self._rest.pop(name, None)
        if value is None:
            if default is _MISSING:
                raise Refusal("missing_parameter", f"'{self.path(name)}' is missing", param=self.path(name))
            return default
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            names = " or ".join(kind.__name__ for kind in kinds)
            message = f"'{self.path(name)}' must be of type {names}"
            if default is _MISSING:  # nothing can stand for it
                raise Refusal("invalid_type", message, param=self.path(name))
            self.refuse("invalid_type", message, name)
            return default
        return value

    def take_object(self, name: str) -> Fields:
        """The fields of a field that is an object, and none where it is absent.

        Raises:
            Refusal: it is no object.
        """
        return Fields(self.take(name, dict, {}), self.path(name), self._refused)

    def take_inert(self, *names: str) -> dict[str, Any]:
        """Those fields that are there and change nothing here, as they came."""
        return {name: self._rest.pop(name) for name in names if name in self._rest}

    def cleared(self, names: Collection[str]) -> dict[str, None]:
        """Those fields that are there, and null or empty; they stay there."""
        return {name: None for name in names if name in self._rest and self._rest[name] in (None, [], {})}

    def take_ids(self, name: str) -> tuple[int, ...]:
        """A field of token ids; empty where it is absent.

        Raises:
            Refusal: it is no list of token ids.
        """
        ids = self.take(name, list, [])
        if not all(type(token_id) is int and 0 <= token_id < 2**31 for token_id in ids):
            raise Refusal("invalid_type", f"'{self.path(name)}' must be a list of token ids", param=self.path(name))
        return tuple(ids)

    def take_int(self, name: str, low: int, high: int, default: int) -> int:
        """An integer field within a range.

        Raises:
            Refusal: it is none, or out of it.
        """
        value: int = self.take(name, int, default)
        if not low <= value <= high:
            raise Refusal("invalid_value", f"'{self.path(name)}' must be {low} to {high}", param=self.path(name))
        return value

    def ignore(self, *names: str) -> None:
        """Fields that change nothing here."""
        for name in names:
            self._rest.pop(name, None)

    def end(self) -> None:
        """Nothing else may be there, but for what is null or empty.

        Raises:
            Refusal: something is.
        """
        for name, value in self._rest.items():
            if value not in (None, [], {}, ""):
                self.refuse("unsupported_parameter", f"'{self.path(name)}' is not supported here", name)


def read_text(parts: list[object], path: str, kinds: Collection[str]) -> str:
    """The text of a message's content parts.

    Args:
        parts: as they came.
        path: of the list within its message, for error messages.
        kinds: the types of parts that are text; the field of it is `text`, in a `refusal` that.

    Raises:
        Refusal: a part is not text.
    """
    texts = []
    for index, part in enumerate(parts):
        fields = Fields(part, f"{path}.{index}")
        kind = fields.take("type", str)
        if kind not in kinds:
            raise Refusal("unsupported_parameter", "content is text", param=fields.path("type"))
        texts.append(fields.take("refusal" if kind == "refusal" else "text", str))
        fields.ignore(*_WITHOUT_MEANING_IN_A_PART)
        fields.end()
    return "".join(texts)
