"""Changes link rates during a job: ranks send requests, and the driver, outside the namespaces, applies them."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from benchmarks.machine.netns import Network, NetworkError

__all__ = ["LinkRates", "ask_for_rate"]

POLL_S = 0.02
ASK_DEADLINE_S = 30.0


class LinkRates:
    """Serves the job's requests for the rate of the last host's link, inside the `with` block.

    Args:
        network: The hosts.
        run_dir: Folder of the run, in which requests are written.
    """

    def __init__(self, network: Network, run_dir: Path) -> None:
        self._network, self._run_dir = network, run_dir
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> LinkRates:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(ASK_DEADLINE_S)

    def _run(self) -> None:
        while not self._stop.wait(POLL_S):
            for wish in sorted(self._run_dir.glob("rate-*.wish")):
                try:
                    self._network.set_rate(len(self._network.hosts) - 1, float(wish.name.split("-")[1]))
                except (NetworkError, ValueError) as error:
                    wish.with_suffix(".failed").write_text(str(error), encoding="utf-8")
                wish.rename(wish.with_suffix(".done"))


def ask_for_rate(run_dir: Path, bits_per_s: float) -> None:
    """Request a rate for the last host's link and wait until it is set; called by one rank.

    Raises:
        NetworkError: The rate could not be set, or nobody answered.
    """
    wish = run_dir / f"rate-{round(bits_per_s)}-{time.monotonic_ns()}.wish"
    wish.touch()
    done, limit_s = wish.with_suffix(".done"), time.monotonic() + ASK_DEADLINE_S
    while not done.exists():
        if time.monotonic() > limit_s:
            raise NetworkError(f"nobody rated a link within {ASK_DEADLINE_S:g} s: is the driver still running?")
        time.sleep(POLL_S)
    failed = wish.with_suffix(".failed")
    if failed.exists():
        raise NetworkError(failed.read_text(encoding="utf-8"))
