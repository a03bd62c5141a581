"""Steps with a GradScaler that a program begins to use once ranks are at different steps, e.g. after a warm-up.

From the first step on a GradScaler keeps a job in `sync`, and all scales are equal. Later, ranks have made different
numbers of steps with it: for some steps until all are in `sync`, and wherever one is inside a collective of the program
while others train. Then their scales differ, the members of a step would unscale its mean in different ways, and a
rank that is late could not unscale it at all. So a step changes parameters only if all ranks are in it and in the step
before. The first such step sets all scales to the initial one.
"""

from __future__ import annotations

import logging
from typing import Any

__all__ = ["ScaledSteps"]

logger = logging.getLogger("star_hvd")


class ScaledSteps:
    """Decides for one optimizer which steps with a GradScaler change nothing, alike on all members of a step."""

    def __init__(self) -> None:
        self._from_the_start: bool | None = None  # Whether a GradScaler was used before ranks were at different steps.
        self._whole_step = -2  # The last step that was whole, if it was the last in which this rank was.

    def skips(self, scaler: Any, step: int, *, whole: bool, mixed: bool) -> bool:
        """Whether a step that contains this rank's gradient must not be applied.

        Args:
            scaler: The GradScaler.
            step: Number of the step.
            whole: Whether the step is of a plan in which all ranks wait for each other, and contains all gradients.
            mixed: Whether ranks may have made different numbers of steps so far.
        """
        if self._from_the_start is None:
            self._from_the_start = not mixed
            if mixed:
                logger.warning(
                    "a GradScaler is used for the first time after ranks have made different numbers of steps: steps "
                    "without a gradient of every rank change nothing from now on, and the scale starts again after "
                    "them; use it from the first step on, or mode='sync'"
                )
        if self._from_the_start:
            return False
        alike, self._whole_step = self._whole_step == step - 1, step if whole else -2
        if whole and not alike:
            _start_again(scaler)
        return not (whole and alike)


def _start_again(scaler: Any) -> None:
    """Set the scale to the initial one behind the program's next `update()`; gradients until then have the present one.
    """

    def update(*args: Any, **kwargs: Any) -> None:
        del scaler.update  # The class's own is used again.
        scaler.update(*args, **kwargs)
        scaler.load_state_dict({**scaler.state_dict(), "scale": scaler._init_scale, "_growth_tracker": 0})

    scaler.update = update
