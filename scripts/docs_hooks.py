"""Hooks of `mkdocs build`: pages link to files of the repository that are not in the site."""

from __future__ import annotations

import re
from typing import Any

_OUTWARD = re.compile(r"\[([^\]]+)\]\(\.\./([^)\s]+)\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Name files outside `docs/` instead of linking them; `tests/tools/test_docs.py` sees to it that they exist."""
    return _OUTWARD.sub(r"`\2`", markdown)
