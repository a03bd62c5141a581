"""Environment variables of the package."""

from __future__ import annotations

import pytest

from star_hvd import env


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", None),
        (" , ", None),
        ("cluster=east", {"cluster": "east"}),
        (" cluster = east , data=v3=b,quiet", {"cluster": "east", "data": "v3=b", "quiet": "yes"}),
    ],
)
def test_tags(monkeypatch: pytest.MonkeyPatch, text: str, expected: dict[str, str] | None) -> None:
    monkeypatch.setenv("STAR_RUN_TAGS", text)
    assert env.tags() == expected
