"""Find out why an optimizer, or its parameters, may not leave `sync`, and keep its driver there."""

from __future__ import annotations

import logging
from collections.abc import KeysView, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from scheduler.records import Plan
from star_hvd import env
from star_hvd.channel.state_transfer import unsendable
from star_hvd.engine.applier import replayable
from star_hvd.engine.buckets import Bucket
from star_hvd.engine.hyperparameters import StateInGroups
from star_hvd.input.network import meets_in_pass
from star_hvd.modes.averaged_state import unaveraged
from star_hvd.modes.driver import StepDriver
from star_hvd.wrapper.lockstep_core import unweighted

__all__ = ["Restrictions", "lockstep_only"]

logger = logging.getLogger("star_hvd")

_THAWED = (
    "{} is trained, but was frozen when the optimizer was wrapped, so its gradient is not reduced, as under Horovod; "
    "give it to the optimizer by add_param_group once it is thawed, not before, or wrap the optimizer again"
)
_IN_GROUPS = (
    "a step of {} changes '{}' in param_groups: it keeps state there, which would differ between ranks that make "
    "different numbers of steps"
)
_UNSENDABLE = "the state of {} cannot be sent to a rank that is late: its entry '{}' {}"
_UNAVERAGED = "the state of {} cannot be averaged in local, and would differ between ranks: its entry '{}' {}"
_WATCHED_STEPS = 2  # Own steps behind which the optimizer's state is looked at: the first may not have all of it.


def lockstep_only(buckets: Sequence[Bucket], groups: Sequence[dict[str, Any]]) -> str | None:
    """Return why parameters on these devices can only be trained in `sync`, None if every mode is possible."""
    kinds = {bucket.flat.device.type for bucket in buckets} - {"cpu"}
    if not kinds:
        return None
    if kinds != {"cuda"}:
        return f"parameters are on {sorted(kinds)}; relaxed modes support CPU and CUDA only, so this trains in sync"
    if (name := env.async_completion()) is not None:
        return f"with {name}, Horovod orders a reduction only before the program's own stream; training in sync"
    if any(isinstance(value, torch.Tensor) and value.is_cuda for group in groups for value in group.values()):
        return "a hyperparameter is a CUDA tensor, which other ranks cannot get in time; training in sync"
    return None


class Restrictions:
    """What keeps an optimizer in sync: looked for when it is attached, and in its first steps or in every one.

    A reason holds for the driver that is given to the call that finds it; an elastic job has another one in every
    world. Used by the training thread.

    Args:
        inner: The user's own optimizer; not the wrapped one, which nothing here may keep alive.
        base: Its class.
        names: Name of every parameter.
        reduced: The parameters whose gradients are reduced; a view, which follows what is added.
        averages: Whether `local` is possible, which averages the optimizer's state.

    Attributes:
        looks_at_every_gradient: What needs every gradient, and thus refuses accumulated micro-batches; else empty.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        base: type[torch.optim.Optimizer],
        names: dict[torch.nn.Parameter, str],
        reduced: KeysView[torch.nn.Parameter],
        *,
        averages: bool,
    ) -> None:
        self._inner = inner
        self._base = base
        self._names = names
        self._reduced = reduced
        self._averages = averages
        self.looks_at_every_gradient = ""
        self._in_groups = StateInGroups(base)
        self._states_to_check = _states_to_check(base)
        self._loose: list[torch.nn.Parameter] = []  # Outside the buckets.

    def new_world(self) -> None:
        """Look at the optimizer's state again, as what is pinned ended with the old world."""
        self._states_to_check = _states_to_check(self._base)

    def parameters_added(self) -> None:
        """Note which parameters are not reduced, after some were put into buckets."""
        params = [param for group in self._inner.param_groups for param in group["params"]]
        self._loose = [param for param in params if param not in self._reduced]

    def at_start(self, driver: StepDriver, plan: Plan | None, buckets: Sequence[Bucket]) -> None:
        """Refuse the modes that the optimizer or its parameters do not allow.

        Args:
            driver: The driver of this world, already attached.
            plan: The user's plan in this world, None for `auto`.
            buckets: The optimizer's flat buckets.
        """
        if issubclass(self._base, torch.optim.LBFGS):
            self.looks_at_every_gradient = "LBFGS evaluates its closure several times per step"
            driver.pin(self.looks_at_every_gradient, equal_batches=True)
        if unweighted():
            driver.pin(unweighted(), equal_batches=True)
        self.parameters_reduced(driver)
        reason = lockstep_only(buckets, self._inner.param_groups)
        if reason is not None:
            if plan is None or plan.relaxed:
                logger.warning("%s", reason)
            driver.pin(reason)

    def parameters_reduced(self, driver: StepDriver) -> None:
        """Stay in `sync` if parameters, now or newly reduced, are of layers whose ranks meet within a pass.

        The first pass that gets to them may come when a relaxed mode is in force.
        """
        if not driver.equal_batches and (reason := meets_in_pass(self._reduced)):
            driver.pin(reason, equal_batches=True)

    def before_step(self, driver: StepDriver) -> None:
        """Stay in `sync` if a parameter is trained that was frozen when the optimizer was wrapped.

        As under Horovod, each rank then updates it by its own gradient in `step()`; servers and helpers could not.
        """
        thawed = [param for param in self._loose if param.requires_grad and param.grad is not None]
        if thawed and driver.engine.agreement.pinned is None:
            driver.pin(_THAWED.format(self._names.get(thawed[0], "a parameter")))

    def watching(self) -> AbstractContextManager[None]:
        """Return the block in which the user's optimizer steps: state that it keeps in its groups is found there."""
        return self._in_groups.watched(self._inner.param_groups)

    def step_made(self, driver: StepDriver) -> None:
        """Stay in `sync` if the step, inside `watching`, has left state that ranks could not have in common."""
        if self._in_groups.found and driver.engine.agreement.pinned is None:
            driver.pin(_IN_GROUPS.format(self._base.__name__, self._in_groups.found))
        self._pin_if_unsendable(driver)

    def _pin_if_unsendable(self, driver: StepDriver) -> None:
        """Stay in `sync` if the optimizer's state cannot be sent: a late rank would ask for it until its deadline.

        Also if `local` is possible, which would leave a part of it each rank's own.
        """
        state = self._inner.state
        if not self._states_to_check or not state:  # There is none while servers make the steps.
            return
        self._states_to_check -= 1
        checks = [(_UNSENDABLE, unsendable)]
        if self._averages:
            checks.append((_UNAVERAGED, unaveraged))
        entries = [entry for param in self._reduced for entry in state.get(param, {}).items()]
        found = ((text, key, check(value)) for text, check in checks for key, value in entries)
        text, key, reason = next((each for each in found if each[-1]), ("", "", ""))
        if reason and driver.engine.agreement.pinned is None:
            driver.pin(text.format(self._base.__name__, key, reason))


def _states_to_check(base: type[torch.optim.Optimizer]) -> int:
    """Return behind how many steps of a world the state is looked at: none if no other rank needs it."""
    return 0 if replayable(base) else _WATCHED_STEPS
