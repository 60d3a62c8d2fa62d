"""For mkdocs: pages link to repository files as GitHub shows them (`../deploy/compose.yaml`); the site has copies."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

_LINK = re.compile(r"\]\(\.\./([^)#\s]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the files that pages link to. One that does not exist is left out: then mkdocs finds the link broken."""
    root = Path(config.docs_dir).parent
    for page in list(files.documentation_pages()):
        for path in _LINK.findall(page.content_string):
            if (root / path).is_file() and files.get_file_from_path(f"repository/{path}") is None:
                files.append(File.generated(config, f"repository/{path}", abs_src_path=str(root / path)))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Points the links to these copies."""
    return _LINK.sub(r"](repository/\1", markdown)
