"""mkdocs' hook: pages may link to files of the repository outside docs/, which a site does not have.

In the site such a link becomes its text and the file's path in the repository; on a forge it stays a
link. tests/docs checks that the file is there.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any

_LINK = re.compile(r"\[([^\]\n]*)\]\((\.\./[^)\s#]*)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by mkdocs for every page."""
    return without_outside_links(markdown, page.file.src_uri)


def without_outside_links(markdown: str, page: str) -> str:
    """``page``: where the text stands, below docs/."""

    def replace(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link[2]))
        if path.startswith("docs/"):
            return link[0]
        text = link[1]
        return f"`{path}`" if text.strip("`") == path else f"{text} (`{path}`)"

    return _LINK.sub(replace, markdown)
