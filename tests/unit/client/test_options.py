import json
import re
from pathlib import Path

from microturn_client import SessionOptions, TurnOptions
from microturn_client._options import DEFAULT_MAX_TOKENS, DEFAULTS, ONE_TURN_OPTIONS

SECTIONS = dict(
    section.split("\n", 1)
    for section in (Path(__file__).parents[3] / "client" / "PROTOCOL.md").read_text().split("\n## ")[1:]
)


def rows(section: str) -> dict[str, list[str]]:
    table = re.findall(r"^\| `(\w+)` \|(.*)\|$", SECTIONS[section], re.MULTILINE)
    return {name: [cell.strip().strip("`") for cell in rest.split("|")] for name, rest in table}


def test_the_types_have_exactly_the_options_that_the_protocol_page_serves():
    # The key is the session's; its core says it with every turn.
    assert rows("Options of every turn").keys() == TurnOptions.__annotations__.keys() | {"session_key"}
    assert rows("Options with START").keys() == (
        SessionOptions.__annotations__.keys() - TurnOptions.__annotations__.keys() - {"session_key"}
    )


def test_the_defaults_are_those_of_the_protocol_page():
    page = {name: cells[1] for name, cells in rows("Options of every turn").items()}
    assert page.pop("max_tokens").startswith(str(DEFAULT_MAX_TOKENS))
    assert {name: page[name] for name in DEFAULTS} == {
        name: value if isinstance(value, str) else json.dumps(value).removesuffix(".0")
        for name, value in DEFAULTS.items()
    }


def test_what_has_no_default_to_go_back_to_is_known():
    assert TurnOptions.__annotations__.keys() - DEFAULTS.keys() == {"max_tokens", "seed", *ONE_TURN_OPTIONS}
    grammars = {"json_schema", "regex", "grammar", "choice", "tool_choice", "grammar_from"}
    assert set(ONE_TURN_OPTIONS) == {"role", "traceparent", "turn", "rewind_to", "count_only", *grammars}
