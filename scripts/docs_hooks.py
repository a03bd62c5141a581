"""Hooks of `mkdocs build` for pages that link to repository files outside the site."""

from __future__ import annotations

import re
from typing import Any

_OUTWARD = re.compile(r"\[([^\]]+)\]\(\.\./([^)\s]+)\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace links to files outside `docs/` by their names; `tests/tools/test_docs.py` checks that they exist."""
    return _OUTWARD.sub(r"`\2`", markdown)
