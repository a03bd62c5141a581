"""What the arguments `overlap` and `accuracy` and their variables may say."""

from __future__ import annotations

from typing import Any

import pytest

from star_hvd.wrapper.arguments import check_accuracy, check_overlap


@pytest.mark.parametrize(
    ("chosen", "given", "wanted"),
    [(None, True, True), (None, False, False), (None, "auto", "auto"), ("1", False, True), ("0", True, False),
     ("auto", False, "auto")],
)  # fmt: skip
def test_the_environment_goes_first(chosen: str | None, given: Any, wanted: Any) -> None:
    assert check_overlap(chosen, given) == wanted


@pytest.mark.parametrize(("chosen", "given"), [(None, "yes"), (None, 1), ("on", True)])
def test_anything_else_is_refused(chosen: str | None, given: Any) -> None:
    with pytest.raises(ValueError, match="expected True, False or 'auto'"):
        check_overlap(chosen, given)


def test_the_refusal_of_an_accuracy_names_all_exact_modes_of_auto() -> None:
    with pytest.raises(ValueError, match=r"only sync, sync\(balanced\) and sync\(steal\)"):
        check_accuracy("exactly")
