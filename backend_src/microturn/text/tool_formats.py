"""How families of models write tool calls; as grammars, for answers that must be calls.

    family       its chat template has  a call
    hermes       <tool_call>            <tool_call>⏎{"name": "f", "arguments": {…}}⏎</tool_call>
    llama3_json  <|python_tag|>         {"name": "f", "parameters": {…}}
    mistral      [TOOL_CALLS]           [TOOL_CALLS][{"name": "f", "arguments": {…}}]
                                        [TOOL_CALLS]f[ARGS]{…}, where [ARGS] is a token
    pythonic     <|python_start|>       [f(city="Bern")]
    harmony      <|channel|>            <|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}

Here calls are only written. The client library reads them, of all these families, whatever the model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from llguidance import LLMatcher

from microturn.errors import InvalidArgument, did_you_mean
from microturn.text.grammar_source import JSON_STYLE, MAX_SOURCE_LEN, GrammarSource, refusal

# What a chat template contains whose model writes calls in a format; the first that is found. Qwen3-Coder's XML has
# hermes' marker too.
_MARKERS = (
    ("<|channel|>", "harmony"),
    ("[TOOL_CALLS]", "mistral"),
    ("<function=", ""),
    ("<tool_call>", "hermes"),
    ("<|python_start|>", "pythonic"),
    ("[func_name1(", "pythonic"),
    ("<|python_tag|>", "llama3_json"),
)


@dataclass(frozen=True)
class _Tool:
    """A tool of a session.

    Attributes:
        name: of the function.
        parameters: the JSON schema of its arguments.
    """

    name: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes tool calls.

    Attributes:
        family: one of the table above.
        special_ids: the ids of its special tokens.
    """

    family: str
    special_ids: Mapping[str, int]

    @classmethod
    def of(cls, template: str, special_ids: Mapping[str, int]) -> Self | None:
        """The format of a chat template's source; None where it has none that is known."""
        family = next((family for marker, family in _MARKERS if marker in template), "")
        return cls(family, special_ids) if family else None

    def as_llguidance(self, source: GrammarSource) -> str:
        """The answers that are nothing but calls. Takes some milliseconds for many tools.

        Args:
            source: its text is ``required`` for one or more calls, or the name of a tool for one call of it. The tools
                are as OpenAI describes them: functions, or functions wrapped in an object.

        Raises:
            InvalidArgument: there is no such tool, one has no name, or all of it is too long.
        """
        choice, known = source.text, [_read(tool) for tool in json.loads(source.tools or "[]")]
        chosen = [tool for tool in known if choice in ("required", tool.name)]
        if not chosen:
            names = [tool.name for tool in known]
            hint = did_you_mean(choice, names) if names else "give them to START as 'tools'"
            raise InvalidArgument(f"tool_choice='{choice[:100]}', and the session has no such tool: {hint}")
        rules = _Rules(chosen, self.special_ids, is_repeated=choice == "required")
        lark = "\n".join(getattr(rules, self.family)()) + "\n"
        if len(lark) > MAX_SOURCE_LEN:
            reason = f"the tools make a grammar of {len(lark)} characters: at most {MAX_SOURCE_LEN} are read"
            raise refusal(source, reason)
        return LLMatcher.grammar_from_lark(lark)


def _read(tool: Mapping[str, Any]) -> _Tool:
    function = tool.get("function", tool)
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise InvalidArgument("a tool is a function with a name: a grammar of calls needs it")
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(parameters, Mapping):
        raise InvalidArgument(f"the parameters of the tool '{name}' are no JSON schema")
    # A function takes no other arguments than those that it names.
    others = {"additionalProperties": False} if "properties" in parameters else {}
    return _Tool(name, {**others, **parameters})


@dataclass(frozen=True)
class _Rules:
    """Rules of a grammar in Lark's notation, for each family.

    Attributes:
        tools: that may be called, at least one.
        special_ids: of the model.
        is_repeated: whether there may be several calls, where the family can write them.
    """

    tools: Sequence[_Tool]
    special_ids: Mapping[str, int]
    is_repeated: bool

    def hermes(self) -> Iterator[str]:
        yield f"start: {self._several('call', _quoted(chr(10)))}"
        begin, end, line_end = self._mark("<tool_call>"), self._mark("</tool_call>"), _quoted("\n")
        yield f"call: {begin} {line_end} object {line_end} {end}"
        yield from self._objects("arguments")

    def llama3_json(self) -> Iterator[str]:
        yield "start: object"
        yield from self._objects("parameters")

    def mistral(self) -> Iterator[str]:
        begin = self._mark("[TOOL_CALLS]")
        if "[ARGS]" not in self.special_ids:
            yield f'start: {begin} "[" {self._several("object", _quoted(", "))} "]"'
            yield from self._objects("arguments")
            return
        yield f"start: {self._several('call', '')}"
        yield self._calls("call", lambda tool: f"{begin} {_quoted(tool.name)} {self._mark('[ARGS]')}")
        yield from self._arguments()

    def pythonic(self) -> Iterator[str]:
        yield f'start: "[" {self._several("call", _quoted(", "))} "]"'
        yield self._calls("call", lambda tool: _quoted(f"{tool.name}("), '")"')
        for at, tool in enumerate(self.tools):
            yield from _keywords(f"args_{at}", tool.parameters)

    def harmony(self) -> Iterator[str]:
        channel, constrain, message = map(self._mark, ("<|channel|>", "<|constrain|>", "<|message|>"))
        begins = {tool.name: _quoted(f"commentary to=functions.{tool.name} ") for tool in self.tools}
        yield self._calls("start", lambda tool: f'{channel} {begins[tool.name]} {constrain} "json" {message}')
        yield from self._arguments()

    def _objects(self, key: str) -> Iterator[str]:
        """The rule `object`: a call as a JSON object, its arguments under a key."""
        yield self._calls("object", lambda tool: _quoted(f'{{"name": {json.dumps(tool.name)}, "{key}": '), '"}"')
        yield from self._arguments()

    def _calls(self, rule: str, head: Callable[[_Tool], str], tail: str = "") -> str:
        """A rule that is a call of any of the tools."""
        return _either(rule, [f"{head(tool)} args_{at} {tail}" for at, tool in enumerate(self.tools)])

    def _arguments(self) -> Iterator[str]:
        for at, tool in enumerate(self.tools):
            yield f"args_{at}: {_json(tool.parameters)}"

    def _several(self, rule: str, between: str) -> str:
        return f"{rule} ({between} {rule})*" if self.is_repeated else rule

    def _mark(self, text: str) -> str:
        """A mark as a grammar writes it: by its token where it is a special one."""
        return f"<[{self.special_ids[text]}]>" if text in self.special_ids else _quoted(text)


def _keywords(rule: str, parameters: Mapping[str, Any]) -> Iterator[str]:
    """Python's keyword arguments: those that are required, then any of the others, in the schema's order."""
    properties, required = parameters.get("properties") or {}, set(parameters.get("required") or ())
    names = sorted(properties, key=lambda name: name not in required)
    shared = {key: parameters[key] for key in ("$defs", "definitions") if key in parameters}
    for at, name in enumerate(names):
        is_boolean = properties[name].get("type") == "boolean"
        value = '("True" | "False")' if is_boolean else f"{rule}_{at}_value"
        yield f"{rule}_{at}: {_quoted(name + '=')} {value}"
        if not is_boolean:
            yield f"{value}: {_json({**properties[name], **shared})}"
    each = [f'", " {rule}_{at}' if name in required else f'(", " {rule}_{at})?' for at, name in enumerate(names)]
    begins = [f"{rule}_{at} {' '.join(each[at + 1 :])}" for at in range(len(names))]
    yield _either(rule, begins[:1] if required & set(names) else [*begins, '""'])


def _either(rule: str, ways: Sequence[str]) -> str:
    return f"{rule}: {' | '.join(ways)}"


def _json(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps({"x-guidance": JSON_STYLE, **schema}, ensure_ascii=False)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
