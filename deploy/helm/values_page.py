"""docs/chart-values.md: every value of the chart with its default, from values.yaml and its comments.

python deploy/helm/values_page.py [--check]

A value's comment stands behind it, or in the lines right above it; a group's comment counts for the group.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

VALUES = Path(__file__).parent / "microturn" / "values.yaml"
PAGE = Path(__file__).parents[2] / "docs" / "chart-values.md"
_HEAD = """# Values of the chart

Generated from [values.yaml](../deploy/helm/microturn/values.yaml) by `make chart-values`. [Deployment](deploy.md) has
the reasons.
"""


class UndocumentedError(Exception):
    """A value without a comment."""


def page() -> str:
    """The whole page.

    Raises:
        UndocumentedError: a value has no comment.
    """
    text = VALUES.read_text()
    groups = yaml.compose(text)
    assert isinstance(groups, yaml.MappingNode)
    comments = Comments(text)
    parts = [_HEAD]
    for key, group in groups.value:
        parts.append(f"\n## {key.value}\n")
        if about := comments.of(key, group):
            parts.append(f"\n{_cell(about)}\n")
        parts.append("\n| value | default | what it is |\n| --- | --- | --- |\n")
        parts += (f"| `{name}` | {default} | {what} |\n" for name, default, what in _rows(key.value, group, comments))
    return "".join(parts)


def _rows(path: str, group: yaml.MappingNode, comments: Comments) -> Iterator[tuple[str, str, str]]:
    for key, value in group.value:
        name, what = f"{path}.{key.value}", comments.of(key, value)
        if _is_group(value) and not what:
            yield from _rows(name, value, comments)
            continue
        if not what:
            raise UndocumentedError(f"{VALUES.name}, line {key.start_mark.line + 1}: {name} has no comment")
        if _is_group(value) and any(comments.of(*member) for member in value.value):
            yield name, "", _cell(what)
            yield from _rows(name, value, comments)
        else:
            yield name, f"`{json.dumps(yaml.safe_load(yaml.serialize(value)))}`", _cell(what)


def _is_group(value: yaml.Node) -> bool:
    return isinstance(value, yaml.MappingNode) and not value.flow_style and bool(value.value)


def _cell(text: str) -> str:
    return text[:1].upper() + text[1:].replace("|", "\\|")


class Comments:
    """The comments of a YAML text, by the keys that they stand with."""

    def __init__(self, text: str) -> None:
        self._lines = text.splitlines()

    def of(self, key: yaml.Node, value: yaml.Node) -> str:
        """What stands above the key and behind it (or behind its value, on one line); empty if nothing does."""
        line = key.start_mark.line
        above: list[str] = []
        while (before := self._lines[line - len(above) - 1].strip()).startswith("#") and len(above) < line:
            above.insert(0, before.removeprefix("#").strip())
        on_one_line = not _is_group(value) and value.end_mark.line == line
        begin = value.end_mark.column if on_one_line else key.end_mark.column + 1
        behind = self._lines[line][begin:].partition("# ")[2].strip()
        return " ".join(filter(None, (*above, behind)))


def main(arguments: list[str]) -> int:
    """Writes the page, or with --check says whether it is what it would be; returns the exit code."""
    try:
        made = page()
    except UndocumentedError as error:
        print(error, file=sys.stderr)
        return 1
    if arguments == ["--check"]:
        if PAGE.read_text() != made:
            print(f"{PAGE.name} is not what values.yaml says: make chart-values", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
