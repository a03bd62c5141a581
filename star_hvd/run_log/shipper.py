"""The process beside rank 0 that sends a run to MLflow while the job runs.

Its standard input is a pipe that nobody writes to: it ends when the job ends, however it ends. Then the rest is sent,
within a minute; what is left stays in the run's folder for `star-hvd sync-logs`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from star_hvd.run_log import layout
from star_hvd.run_log.sender import Sender

__all__ = ["main", "ship"]

logger = logging.getLogger("star_hvd.run_log")

_POLL_S = 2.0
_LINGER_S = 60.0
_RANKS_S = 10.0
_LARGEST_PAUSE_S = 60.0


def main(argv: Sequence[str]) -> int:
    """`argv` holds the run's folder."""
    directory = Path(argv[0])
    _step_back()
    with contextlib.suppress(OSError):
        logging.basicConfig(filename=directory / "shipper.log", level=logging.INFO, format="%(asctime)s %(message)s")
    lock = layout.RunLock(directory, sending=True)
    if not lock.take():
        logger.error("another process is sending this run")
        return 1
    try:
        return 0 if ship(directory) else 1
    except Exception:
        logger.exception("the run is not complete; star-hvd sync-logs sends the rest")
        return 1


def ship(directory: Path) -> bool:
    """Send until the job has ended, then the rest; whether MLflow has everything."""
    ended = threading.Event()
    threading.Thread(target=_watch_parent, args=(ended,), daemon=True).start()
    sender = Sender(directory, layout.tracking_uri(directory.parent.parent))
    pause_s = _POLL_S
    while True:
        over = ended.is_set()
        try:
            if sender.send() or over:
                _await_ranks(directory)
                sender.finish("KILLED")
                logger.info("complete: %s", sender.uri)
                return True
            pause_s = _POLL_S
        except Exception as error:
            logger.warning("not sent for now: %s: %s", type(error).__name__, str(error)[:300])
            pause_s = min(_LARGEST_PAUSE_S, 2.0 * pause_s)
        # Once the job is over there is a minute left: try again soon.
        if over:
            time.sleep(_POLL_S)
        else:
            ended.wait(pause_s)


def _await_ranks(directory: Path) -> None:
    """Let the other ranks of this host end their files, for a moment: rank 0 may end first."""
    limit_s = time.monotonic() + _RANKS_S
    while layout.is_live(directory) and time.monotonic() < limit_s:
        time.sleep(0.1)


def _watch_parent(ended: threading.Event) -> None:
    """Note the end of the job, and end this process a minute later even if a server hangs."""
    with contextlib.suppress(OSError, ValueError):
        select.select([sys.stdin], [], [])
    ended.set()
    time.sleep(_LINGER_S)
    logger.warning("gave up; star-hvd sync-logs sends the rest")
    os._exit(1)


def _step_back() -> None:
    """Use only what the job leaves over."""
    with contextlib.suppress(OSError):
        os.nice(19)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
