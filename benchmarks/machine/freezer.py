"""Stops one process repeatedly (SIGSTOP): a helper process for a rank that freezes."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time

__all__ = ["Freezer", "main"]

END_DEADLINE_S = 10.0
GO = b"go\n"


class Freezer:
    """Freezes this process for part of every period while inside the `with` block.

    The first part of a period is unfrozen. The helper never leaves the process stopped: it continues it when the block
    ends, when its pipe closes, and before the helper itself ends.

    Args:
        freeze_s: How long the process is stopped per period.
        every_s: Length of a period.
    """

    def __init__(self, freeze_s: float, every_s: float) -> None:
        if not 0.0 < freeze_s < every_s:
            raise ValueError(f"stopped {freeze_s} s in every {every_s} s; expected more than 0 and less than all of it")
        # Started here, outside the timed part: starting a Python process takes a moment.
        self._helper = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.machine.freezer", str(os.getpid()), str(freeze_s), str(every_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        )

    def __enter__(self) -> Freezer:
        assert self._helper.stdin is not None
        self._helper.stdin.write(GO)
        self._helper.stdin.flush()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._helper.stdin is not None
        self._helper.stdin.close()
        try:
            self._helper.wait(END_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._helper.kill()
            self._helper.wait()


def main(argv: list[str]) -> int:
    """Freeze process `argv[0]` for `argv[1]` s in every `argv[2]` s, from a line on standard input to its end."""
    pid, freeze_s, every_s = int(argv[0]), float(argv[1]), float(argv[2])
    if os.read(0, len(GO)) != GO:
        return 0
    next_s = time.monotonic() + every_s - freeze_s
    try:
        while not _closed(next_s - time.monotonic()):
            os.kill(pid, signal.SIGSTOP)
            # The process cannot end the block while it is stopped, but others may end its job.
            _closed(freeze_s)
            os.kill(pid, signal.SIGCONT)
            next_s += every_s
    except ProcessLookupError:
        return 0
    finally:
        _continue(pid)
    return 0


def _closed(wait_s: float) -> bool:
    """Wait for at most `wait_s` until the pipe is closed; return whether it is."""
    ready, _, _ = select.select([0], [], [], max(0.0, wait_s))
    return bool(ready) and not os.read(0, 1)


def _continue(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        pass


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
