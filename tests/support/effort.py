"""How many random cases a test tries.

`make test` tries as many as fit into its time, `make test-quick` three tenths of them; `TEST_EFFORT=10 make test` tries
ten times as many. All random tests scale with it; those without an explicit number use hypothesis's 100 times this.
"""

from __future__ import annotations

import os

__all__ = ["cases"]


def cases(usual: int) -> int:
    """Return `usual` times the environment variable `TEST_EFFORT`."""
    return max(1, round(usual * float(os.environ.get("TEST_EFFORT", "1"))))
