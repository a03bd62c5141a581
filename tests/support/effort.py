"""How many random cases a test looks at.

`make test` takes as many as fit into its time, `make test-quick` three tenths of them; `TEST_EFFORT=10 make test` looks
at ten times as many. All random tests count by it: those that say nothing have hypothesis's 100, times this.
"""

from __future__ import annotations

import os

__all__ = ["cases"]


def cases(usual: int) -> int:
    """`usual`, times what the environment variable `TEST_EFFORT` says."""
    return max(1, round(usual * float(os.environ.get("TEST_EFFORT", "1"))))
