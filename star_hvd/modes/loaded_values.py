"""What the program loads while the other ranks' steps, or servers, would replace it.

Where ranks meet, a rank that is behind gets the newest state, and at servers each rank gets the newest parameters. What
the program has loaded by then is kept, and written back afterwards: by the functions that broadcast a state before they
do so, and when all ranks leave servers, which start again with it.
"""

from __future__ import annotations

from collections.abc import Callable

from star_hvd.engine.records import Snapshot
from star_hvd.engine.step_engine import StepEngine

__all__ = ["LoadedValues"]


class LoadedValues:
    """See the module docstring. Used by the training thread, which alone writes live parameters.

    Args:
        engine: The optimizer's engine.
        written: Whether the program has written to the live parameters since they were last received or stepped.
    """

    def __init__(self, engine: StepEngine, written: Callable[[], bool]) -> None:
        self._engine = engine
        self._written = written
        self._kept: Snapshot | None = None
        self._parameters = False  # Whether parameters are to be written back; else only the optimizer's state.

    def keep(self) -> None:
        """Before a function that broadcasts a state meets the other ranks: keep what this rank has loaded."""
        replica = self._engine.replica
        self._kept, self._parameters = None, self._written()
        if self._parameters or replica.state_loaded:
            self._kept = replica.loaded_snapshot(state_too=replica.state_loaded)
            replica.set_aside()

    def put_back(self) -> None:
        """Once all ranks have met: write back what was kept. What the function then broadcasts is for all ranks."""
        kept, self._kept = self._kept, None
        if kept is not None:
            self._engine.replica.load(kept, parameters=self._parameters)
        self._engine.replica.accept()

    def copy(self) -> Snapshot | None:
        """Return the parameters that the program has loaded, None if it has loaded none."""
        return self._engine.replica.loaded_snapshot(state_too=False) if self._written() else None

    def write(self, values: Snapshot | None) -> None:
        """Write back what `copy` returned."""
        if values is not None:
            self._engine.replica.load(values)
