"""Say where in the program a rank's training thread is while the other ranks wait for it."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from pathlib import PurePath
from types import FrameType

__all__ = ["Whereabouts", "place_of"]

logger = logging.getLogger("star_hvd")

_OUTER, _INNER = 3, 5  # Frames shown of a deeper stack: the program's own, and where it stands.
_AGAIN_S = 60.0  # A thread that has not moved is logged this often.


def place_of(thread: threading.Thread) -> str:
    """Return a thread's stack in a line, outermost call first, empty if the thread has ended.

    `train.py:31 in main > utils/data/dataloader.py:1291 in _try_get_data > python3.11/selectors.py:415 in select`
    """
    frame: FrameType | None = sys._current_frames().get(thread.ident or 0)
    if not thread.is_alive():  # Another thread may have its number.
        return ""
    places: list[str] = []
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith("<frozen"):  # The import system, and `python -m`.
            path = "/".join(PurePath(code.co_filename).parts[-3:])
            places.append(f"{path}:{frame.f_lineno} in {code.co_name}")
        frame = frame.f_back
    places.reverse()
    if len(places) > _OUTER + _INNER:
        places[_OUTER:-_INNER] = ["..."]
    return " > ".join(places)


class Whereabouts:
    """Logs where the training thread is, when others wait for it.

    Args:
        clock: Time in seconds; only differences count.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = ""
        self._logged_s = 0.0

    def log(self, thread: threading.Thread, *, rank: int, step: int, waited_s: float) -> None:
        """Log where the thread is; less often while it has not moved.

        Args:
            thread: The training thread of this rank.
            rank: This rank.
            step: The step that waits for it, -1 for the end of the job.
            waited_s: For how many seconds.
        """
        found, now_s = place_of(thread), self._clock()
        place = f"is at {found}" if found else "has ended"
        if place == self._last and now_s - self._logged_s < _AGAIN_S:
            return
        self._last, self._logged_s = place, now_s
        logger.warning(
            "%s has been waiting for this rank, %d, for %.0f s; its training thread %s",
            f"step {step}" if step >= 0 else "the end of the job",
            rank,
            waited_s,
            place,
        )
