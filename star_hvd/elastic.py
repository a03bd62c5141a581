"""Elastic training: Horovod's `run`, with the channel and the optimizers restarted after every reset."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from horovod.common.elastic import ObjectState
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from horovod.torch import elastic as _elastic
from horovod.torch.elastic import ElasticSampler
from horovod.torch.elastic import state as _state

from star_hvd.errors import ChannelError, DeadlineError, RankLostError, StarError
from star_hvd.functions import broadcast_object, broadcast_optimizer_state, broadcast_parameters
from star_hvd.loader import ShardLoader
from star_hvd.runtime import runtime

__all__ = ["ElasticSampler", "TorchState", "run"]

logger = logging.getLogger("star_hvd")


class _ModelHandler(_state.ModelStateHandler):  # type: ignore[misc]  # Horovod is untyped.
    """A model in the state of an elastic job."""

    def sync(self) -> None:
        """Take rank 0's parameters; where ranks train already, they meet first."""
        broadcast_parameters(self.value.state_dict(), root_rank=0)


class _OptimizerHandler(_state.OptimizerStateHandler):  # type: ignore[misc]  # Horovod is untyped.
    """An optimizer in the state of an elastic job."""

    def sync(self) -> None:
        """Take rank 0's state. A rank that joins keeps its parameters: Horovod's own broadcast would decay them."""
        broadcast_optimizer_state(self.value, root_rank=0)

    def save_local_state(self) -> None:
        """Save the state that is on this rank, without asking those that have a newer one."""
        wrapped = getattr(self.value, "_star", None)
        state = self.value.state_dict() if wrapped is None else wrapped.local_state()
        self._saved_optimizer_state = copy.deepcopy(state)


class _LoaderHandler(_state.StateHandler):  # type: ignore[misc]  # Horovod is untyped.
    """A loader of `shard` in the state of an elastic job: after a reset its epoch continues from the last commit."""

    def __init__(self, value: ShardLoader) -> None:
        super().__init__(value)
        self.save()

    def save(self) -> None:
        """Ask the coordinator what all ranks have consumed; called at a commit, after a step."""
        self._saved = self.value.state_dict()

    def restore(self) -> None:
        """Go back to the last commit."""
        self.value.load_state_dict(self._saved)

    def sync(self) -> None:
        """Continue on all ranks from the state of the new rank 0; new ranks have none of the epoch."""
        self._saved = broadcast_object(self._saved, 0)
        self.restore()


_state.set_handler_registry(
    [
        (torch.nn.Module, _ModelHandler), (torch.optim.Optimizer, _OptimizerHandler), (ShardLoader, _LoaderHandler),
        *_state.get_handler_registry(),
    ]
)  # fmt: skip


def _place_in_commit(handler: Any) -> int:
    """Return when a handler saves: a loader last, since parameters must not be ahead of the samples in its epoch."""
    kinds = (_state.OptimizerStateHandler, _state.ModelStateHandler)
    return next((place for place, kind in enumerate(kinds) if isinstance(handler, kind)), len(kinds))


def _save_locally(handler: Any) -> None:
    """Save an object; of an optimizer the state that this rank has."""
    if isinstance(handler, _OptimizerHandler):
        handler.save_local_state()
    else:
        handler.save()


class TorchState(_elastic.TorchState):  # type: ignore[misc]  # Horovod is untyped.
    """State of an elastic job; see `horovod.torch.elastic.TorchState`.

    A loader of `shard` among the keyword arguments continues in the middle of its epoch after a reset, and each sample
    is still used once.

    If a rank is late: a commit is collective. Ranks that wait in it are inactive, so that others do not wait for their
    gradients.

    Within a loop over `shard` all ranks need equally many iterations for it, so `auto` stays in the exact modes from
    the first commit behind two steps of such a loop. In a mode set by name that gives ranks different numbers of
    iterations, as `ps(x)` or `sync(steal)`, they may wait for each other in vain: there commit behind the loop.

    Inside a step of micro-batches a commit is made behind the step, when the loop asks for its next batch. A rank from
    which others take over may commit behind its only micro-batch, at the end of the step: ranks that commit inside the
    step would wait for it, and it would end the step without their gradients.
    """

    def save(self) -> None:
        """Save all or nothing; optimizers first, whose `state_dict` may bring the model to the newest step."""
        self._save(lambda handler: handler.save())

    def _save(self, save: Callable[[Any], None]) -> None:
        with self._all_or_nothing():
            for handler in sorted(self._handlers.values(), key=_place_in_commit):
                save(handler)
            ObjectState.save(self)

    @contextlib.contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Keep the last commit if the block, which saves, fails: half of each would have samples trained twice."""
        handlers = [(handler, dict(vars(handler))) for handler in self._handlers.values()]
        attributes: dict[str, Any] = vars(self)["_saved_state"]
        try:
            yield
        except BaseException:
            for handler, kept in handlers:
                vars(handler).update(kept)
            self._saved_state = attributes
            raise

    def commit(self) -> None:
        """Save the state, and check whether hosts were added or removed. Collective."""
        self._do_behind_step(super().commit, replaces=True)

    def check_host_updates(self) -> None:
        """Check whether hosts were added or removed. Collective."""
        self._do_behind_step(self._check_host_updates, replaces=False)

    def _do_behind_step(self, task: Callable[[], None], *, replaces: bool) -> None:
        """Call `task` now, or inside a step of micro-batches behind it; one that `replaces` includes any other.

        One of a step that the loop has left is called before the next: the other ranks have made it.
        """
        running = runtime.current()
        if running is None:
            task()
        elif not running.inside_step:
            running.end_step_of_parts()
            task()
        elif replaces or running.behind_step is None:
            running.behind_step = task

    def _check_host_updates(self) -> None:
        running = runtime.current()
        inactive: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        waits: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        # Horovod broadcasts by its own function, which notes nothing.
        name = "elastic.TorchState.commit or check_host_updates"
        if running is not None:
            waits = running.program_waits.during(name)
        if running is not None and running.drivers:
            running.loops.note_collective(name)
            inactive = running.inactive("commit", out_of_data=False)
        try:
            with waits, inactive:
                super().check_host_updates()
        except HostsUpdatedInterrupt as interrupt:
            # Where hosts have only left, too: ranks may be at different steps, and loaders go on from what is synced.
            interrupt.skip_sync = False
            # Parameters stay as they are: attributes and loaders must not go back to the last commit, and an optimizer
            # not to the state it had when it was last asked for it. Its servers end with this world.
            _refresh_optimizers(self)
            # Models and optimizers, too: a failure before the next commit must not take them back behind the loaders.
            self._save(_save_locally)
            raise

    def restore(self) -> None:
        """Return to the last commit after a failure, without communication.

        The runtime is reset first, because loading an optimizer's state is collective and a rank may be dead.
        """
        running = runtime.current()
        if running is not None:
            # A step under way ends, if its world can still end it: what follows need not be a new world.
            with contextlib.suppress(HorovodInternalError, StarError):
                running.finish_steps()
        runtime.on_reset()
        super().restore()


def run(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the training function of an elastic job; see `horovod.torch.elastic.run`.

    If a rank is lost: the survivors' steps fail with `HorovodInternalError`, Horovod forms a new world, the state is
    restored to its last commit, and every optimizer found in the state continues in `sync` in the new world, until
    its mode, parsed again for the new number of ranks, is in force; a mode that is impossible there stays `sync`, with
    a warning. A failure of the channel (`ChannelError`, `DeadlineError`) is treated the same.
    """

    @functools.wraps(function)
    def inside(state: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            with runtime.inside_elastic():
                _restart(state)
                return function(state, *args, **kwargs)
        except (ChannelError, DeadlineError) as error:
            # Horovod recovers from its own errors only; a failed channel or server is reported as a lost rank.
            raise RankLostError(f"{type(error).__name__}: {error}") from error

    def wrapper(state: Any, *args: Any, **kwargs: Any) -> Any:
        state.register_reset_callbacks([runtime.on_reset])
        return _elastic.run(inside)(state, *args, **kwargs)

    return functools.wraps(function)(wrapper)


def _restart(state: Any) -> None:
    """Attach the optimizers in `state` to the current world, unless they are attached already."""
    for wrapped in _optimizers(state):
        wrapped._star.restart()


def _refresh_optimizers(state: Any) -> None:
    """Get the newest state of the optimizers in `state`, as far as the world that ends still provides it."""
    for wrapped in _optimizers(state):
        try:
            wrapped._star.refresh_state()
        except (HorovodInternalError, StarError) as error:
            logger.warning("an optimizer continues in the new world with the state it has: %s", error)


def _optimizers(state: Any) -> Iterator[Any]:
    """Yield the wrapped optimizers in `state`."""
    for value in vars(state).values():
        if isinstance(value, torch.optim.Optimizer):
            wrapped = value.__dict__.get("_star_wrapped", lambda: None)()
            if wrapped is not None:
                yield wrapped
