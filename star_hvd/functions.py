"""Horovod's functions for user code, usable while other ranks train.

A rank inside a blocking collective of the user's program delivers no gradients. Once a relaxed mode has been active, it
reports itself to the coordinator as inactive, so that other ranks do not wait for it. Before that, all ranks are at the
same place in their programs, as under Horovod, and nothing is reported: otherwise a rank that leaves a broadcast
slightly after the others would lose its first gradient.

A program that also calls the functions of the package `horovod.torch` gets these ones there while it has an optimizer
of `star_hvd`: the names that Horovod gives to unnamed operations count those of a process, which no longer match then.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import sys
import time
import types
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import horovod.torch
import torch
from horovod.common import process_sets as horovod_sets
from horovod.torch import functions as horovod_functions
from horovod.torch import global_process_set, mpi_ops

from star_hvd import build_check, env
from star_hvd.channel.messages.joins import ProgramCollective
from star_hvd.engine.collective import tune_horovod
from star_hvd.input.joined import described
from star_hvd.modes.driver import StepDriver
from star_hvd.run_log.facts import note_initial_state
from star_hvd.runtime import runtime
from star_hvd.runtime.host_sets import make_host_sets
from star_hvd.runtime.process_sets import prepare_init

__all__ = [
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "join",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "shutdown",
    "synchronize",
]

logger = logging.getLogger("star_hvd")

P = ParamSpec("P")
R = TypeVar("R")


def _named(function: Callable[P, R]) -> Callable[P, R]:
    """Give every operation that returns a handle a name that is equal on all ranks, and describe it to ranks in `join`.

    Horovod names unnamed operations by a counter per process. In relaxed modes ranks submit different numbers of
    operations, so the names of the user's operations would no longer match.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        run = runtime.current()
        if run is not None:
            run.finish_steps()
        if run is None or not run.trains:
            return function(*args, **kwargs)
        given = signature.bind(*args, **kwargs)
        collective = _name(run, function.__name__, given, meets=False)
        if collective is None:
            return function(*given.args, **given.kwargs)
        run.joined.begin(collective)
        handle = function(*given.args, **given.kwargs)
        run.joined.submitted(handle, collective)
        return handle

    return wrapper


def _name(
    run: runtime.Runtime, operation: str, given: inspect.BoundArguments, *, meets: bool
) -> ProgramCollective | None:
    """Name an operation, and return its description for ranks in `join`; None in a process set of the user's."""
    named, where = given.arguments.get("name") is not None, given.arguments.get("process_set", global_process_set)
    together = where is global_process_set
    # Only its members call an operation of a set, and only their numbers must agree there.
    counter = "named" if named else operation if together else f"{operation}.in.{where.ranks}"
    if together or not named:
        run.user_calls[counter] += 1
    if not named and "name" in given.signature.parameters:
        given.arguments["name"] = f"{operation}.star.{run.user_calls[counter]}"
    if not together:
        return None
    return described(operation, dict(given.arguments), counter, run.user_calls[counter], meets=meets)


def _in_graph(function: Callable[P, R]) -> Callable[P, R]:
    """Keep every optimizer in `sync` if backward passes through the operation, since all ranks then meet within a step.

    Detected in the first backward pass, as with `SyncBatchNorm`, before a relaxed mode can be active. Results that the
    program only reads, such as the mean of a loss, change nothing.
    """

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        result = function(*args, **kwargs)
        for output in result if isinstance(result, (list, tuple)) else (result,):
            if isinstance(output, torch.Tensor) and output.requires_grad and output.grad_fn is not None:
                output.register_hook(_stay_in_sync)
        return result

    return wrapper


def _stay_in_sync(grad: torch.Tensor) -> None:
    run = runtime.current()
    for driver in list(run.drivers.values()) if run is not None else ():
        driver.pin("a collective of the program is part of its backward pass", equal_batches=True)


def _name_in_backward(name: str) -> None:
    """Name the collectives that Horovod submits in the backward pass of another, for the reason given in `_named`.

    Horovod's own functions look them up in its module; names that programs have imported from it are unaffected.
    """
    function = getattr(mpi_ops, name)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        run = runtime.current()
        if run is not None and run.trains and len(args) == 1 and "name" not in kwargs:
            where = kwargs.get("process_set", global_process_set)
            counter = f"backward.{name}" if where is global_process_set else f"backward.{name}.in.{where.ranks}"
            run.user_calls[counter] += 1
            kwargs["name"] = f"{name}.star.backward.{run.user_calls[counter]}"
        return function(*args, **kwargs)

    setattr(mpi_ops, name, wrapper)


def _inactive_in(function: Callable[P, R], *, meets: bool = True) -> Callable[P, R]:
    """Mark this rank as inactive during `function` while ranks may be at different steps.

    Args:
        function: Blocks until all ranks have called it.
        meets: Whether all ranks call it at the same place in their programs; replicas are then made equal first.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        run = runtime.current()
        if run is None or not run.trains:
            return function(*args, **kwargs)
        run.finish_steps()
        given = signature.bind(*args, **kwargs)
        where = given.arguments.get("process_set", global_process_set)
        run.loops.note_collective(function.__name__, of_all=where is global_process_set)
        mixed = run.mixed
        # In a process set of the user's, members do not wait for other ranks.
        collective = _name(run, function.__name__, given, meets=mixed and run.meets) if meets else None
        with run.joined.during(collective) if collective is not None else contextlib.nullcontext():
            if mixed:
                with _waits(run, function.__name__, meets=collective is not None):
                    return function(*given.args, **given.kwargs)
            began_s = time.monotonic()
            try:
                return function(*given.args, **given.kwargs)
            finally:
                for driver in run.drivers.values():
                    driver.timer.add_outside(time.monotonic() - began_s)

    return _reported(wrapper) if meets else wrapper


def _waits(run: runtime.Runtime, name: str, *, meets: bool) -> contextlib.AbstractContextManager[None]:
    """Return the block in which this rank waits in a collective of the program's."""
    if meets:
        return run.meeting(name, in_pass=True)
    return run.inactive(name, out_of_data=False)


def _reported(function: Callable[P, R]) -> Callable[P, R]:
    """Report that the program waits for all ranks in `function`, unless it is one of a process set of the user's."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        run = runtime.current()
        if run is None:
            return function(*args, **kwargs)
        where = signature.bind(*args, **kwargs).arguments.get("process_set", global_process_set)
        of_all = where is global_process_set
        with run.program_waits.during(function.__name__) if of_all else contextlib.nullcontext():
            return function(*args, **kwargs)

    return wrapper


def _of_all_ranks(function: Callable[P, R]) -> Callable[P, R]:
    """Mark this rank as inactive while all ranks change the process sets.

    All of them call `function`, so its argument `process_set` is hidden from `_inactive_in`, which would take the call
    for one of the set's members alone.
    """

    def change(*given: Any, **named: Any) -> R:
        return function(*given, **named)

    change.__name__ = function.__name__
    inactive = _inactive_in(change)

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        return inactive(*inspect.signature(function).bind(*args, **kwargs).args)

    return wrapper


def _drivers() -> list[StepDriver]:
    run = runtime.current()
    if run is None or not run.trains or not run.in_training_thread():
        return []
    return [driver for driver in list(run.drivers.values()) if not driver.dropped]


def _broadcasting(function: Callable[P, R], *, state: bool) -> Callable[P, R]:
    """Broadcast what the program has loaded on the root, whichever steps the other ranks have made meanwhile.

    Ranks meet first, where they get the newest parameters: what was loaded is kept, and written back before the
    broadcast. If servers hold the parameters, all ranks leave them, and they start again with what was broadcast.

    Args:
        function: The broadcast, of all ranks.
        state: Whether it broadcasts an optimizer's state, which servers lack even if no parameter was written.
    """

    @functools.wraps(function)
    def put_back_first(*args: P.args, **kwargs: P.kwargs) -> R:
        for driver in _drivers():
            driver.loaded.put_back()
        return function(*args, **kwargs)

    meets = _inactive_in(put_back_first)

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        drivers = _drivers()
        for driver in drivers:
            driver.finish_step()
            driver.loaded.keep()
            driver.broadcasts, driver.loads_state = True, state
        try:
            return meets(*args, **kwargs)
        finally:
            for driver in drivers:
                driver.broadcasts = driver.loads_state = False
                driver.forget_writes()  # All ranks have this now, as they have a step's result.

    return wrapper


allreduce = _inactive_in(_in_graph(mpi_ops.allreduce))
allreduce_ = _inactive_in(mpi_ops.allreduce_)
grouped_allreduce = _inactive_in(_in_graph(mpi_ops.grouped_allreduce))
grouped_allreduce_ = _inactive_in(mpi_ops.grouped_allreduce_)
allgather = _inactive_in(_in_graph(mpi_ops.allgather))
grouped_allgather = _inactive_in(_in_graph(mpi_ops.grouped_allgather))
broadcast = _inactive_in(_in_graph(mpi_ops.broadcast))
broadcast_ = _inactive_in(mpi_ops.broadcast_)
alltoall = _inactive_in(_in_graph(mpi_ops.alltoall))
reducescatter = _inactive_in(_in_graph(mpi_ops.reducescatter))
grouped_reducescatter = _inactive_in(_in_graph(mpi_ops.grouped_reducescatter))
allreduce_async = _named(mpi_ops.allreduce_async)
allreduce_async_ = _named(mpi_ops.allreduce_async_)
grouped_allreduce_async = _named(mpi_ops.grouped_allreduce_async)
grouped_allreduce_async_ = _named(mpi_ops.grouped_allreduce_async_)
allgather_async = _named(mpi_ops.allgather_async)
grouped_allgather_async = _named(mpi_ops.grouped_allgather_async)
broadcast_async = _named(mpi_ops.broadcast_async)
broadcast_async_ = _named(mpi_ops.broadcast_async_)
alltoall_async = _named(mpi_ops.alltoall_async)
reducescatter_async = _named(mpi_ops.reducescatter_async)
grouped_reducescatter_async = _named(mpi_ops.grouped_reducescatter_async)
for _each in (
    "allreduce", "grouped_allreduce", "allgather", "grouped_allgather", "alltoall", "reducescatter",
    "grouped_reducescatter",
):  # fmt: skip
    _name_in_backward(_each)
barrier = _inactive_in(mpi_ops.barrier)
_synchronize = _inactive_in(mpi_ops.synchronize, meets=False)  # In different orders on different ranks, or by `poll`.
broadcast_parameters = _broadcasting(horovod_functions.broadcast_parameters, state=False)
broadcast_object = _inactive_in(horovod_functions.broadcast_object)
allgather_object = _inactive_in(horovod_functions.allgather_object)


@functools.partial(_broadcasting, state=True)
def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int, model: Any = None) -> None:
    """Broadcast an optimizer's state from `root_rank`.

    Horovod initializes an empty state by a step on zero gradients, which changes parameters under weight decay (AdamW:
    by lr * wd); this function restores them. The zero gradients stay, as under Horovod.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    before = [(param, param.detach().clone()) for param in params]
    initial = not vars(optimizer).get("state") and mpi_ops.rank() == root_rank
    horovod_functions.broadcast_optimizer_state(optimizer, root_rank, model)
    if initial:
        note_initial_state(optimizer)
    with torch.no_grad():
        for param, value in before:
            param.copy_(value)


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Initialize Horovod. The channel starts later, with the first optimizer or loader.

    Args:
        comm: See `horovod.torch.init`.
        process_sets: See `horovod.torch.init`. Dynamic process sets are enabled where they cost nothing, unless
            `HOROVOD_DYNAMIC_PROCESS_SETS` is set.

    Raises:
        BuildMismatchError: Ranks run different builds of Horovod; raised on all ranks.
    """
    if runtime.current() is not None and not mpi_ops.is_initialized():
        runtime.on_reset()
    fresh = not mpi_ops.is_initialized()
    if comm is None and fresh:
        build_check.compare_before_init()  # Before Horovod's own protocol is used.
    # Once more, as helper functions do, Horovod's wrapper would forget the operations that are in flight.
    (mpi_ops.init if fresh else mpi_ops._basics.init)(comm, prepare_init(comm, process_sets))
    if runtime.current() is not None:
        runtime.leave_before_horovod()
    tune_horovod(True)
    if fresh:
        if comm is None and mpi_ops.size() == 1:
            env.warn_alone()
        make_host_sets()


def shutdown() -> None:
    """Wait until all ranks have finished, then shut Horovod down.

    While this rank waits, its helper contributes to the other ranks' steps. Lost ranks are not waited for.
    """
    runtime.shutdown()
    mpi_ops.shutdown()


@functools.wraps(mpi_ops.synchronize)
def synchronize(handle: Any) -> Any:
    result = _synchronize(handle)
    run = runtime.current()
    if run is not None:
        run.joined.ended(handle)
    return result


@_of_all_ranks
@functools.wraps(horovod_sets.add_process_set)
def add_process_set(process_set: Any) -> Any:
    run = runtime.current()
    return horovod_sets.add_process_set(process_set) if run is None else run.services.sets.add_users(process_set)


@_of_all_ranks
@functools.wraps(horovod_sets.remove_process_set)
def _remove_process_set(process_set: Any) -> bool:
    run = runtime.current()
    remove = horovod_sets.remove_process_set if run is None else run.services.sets.remove_users
    return bool(remove(process_set))


@functools.wraps(horovod_sets.remove_process_set)
def remove_process_set(process_set: Any) -> bool:
    if not process_set.process_set_id:  # Never added, or all ranks: Horovod answers at once.
        return False
    return _remove_process_set(process_set)


def join(*args: Any, **kwargs: Any) -> int:
    """Declare that this rank has no more data and wait until all ranks have joined; return the last rank to join.

    While it waits, its helper contributes its late gradients to the other ranks' steps, then zeros. To the others'
    reductions (`allreduce`, also asynchronous or grouped) it adds zeros, as under Horovod.

    Raises:
        StarError: A rank has called another collective than a reduction while some are in `join`; raised on those, and
            on that rank if it could know.
    """
    run = runtime.current()
    last = run.join() if run is not None and run.trains else None
    of_horovod = int(mpi_ops.join(*args, **kwargs))
    if run is not None:
        run.program_waits.joined()
    return of_horovod if last is None else last


# ---- under Horovod's names --------------------------------------------------------------------------------------

_MARK = "_star_hvd_replaces"
_LIBRARIES = ("star_hvd", "horovod")
_WITHOUT_OPTIMIZER = ("add_process_set", "init", "join", "remove_process_set", "shutdown")


def needed(name: str) -> bool:
    """Whether a program that calls `name` of `horovod.torch` needs the function of this module.

    Horovod's `init` would forget operations in flight, and its `shutdown` leave while other ranks still train. Process
    sets may still be removed when the last optimizer is closed, and behind `join` collectives are counted anew.
    """
    run = runtime.current()
    return run is not None and (run.trains or name in _WITHOUT_OPTIMIZER)


def replace_in_horovod(ours: Mapping[str, Callable[..., Any]]) -> None:
    """Replace functions of the package `horovod.torch`; those that were replaced before are replaced anew.

    Its modules `mpi_ops` and `functions`, which Horovod's own modules and ours use, keep Horovod's.
    """
    for name, function in ours.items():
        found = getattr(horovod.torch, name)
        horovods = found.__wrapped__ if hasattr(found, _MARK) else found
        setattr(horovod.torch, name, _replacement(name, horovods, function))


def _replacement(name: str, horovods: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(horovods)
    def function(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe().f_back  # None if it is not Python that calls, as with exit handlers.
        if not needed(name) or (caller is not None and _of_library(str(caller.f_globals.get("__name__")))):
            return horovods(*args, **kwargs)
        return ours(*args, **kwargs)

    # Pickled by reference, it becomes whatever has this name where it is loaded.
    function.__module__, function.__qualname__ = "horovod.torch", name
    setattr(function, _MARK, True)
    return function


def _of_library(module: str) -> bool:
    return module.partition(".")[0] in _LIBRARIES


def rebind_imported() -> None:
    """Put the replacements where modules that were imported before hold Horovod's functions as global names."""
    replacements: dict[int, Callable[..., Any]] = {}
    for name, function in vars(horovod.torch).items():
        if hasattr(function, _MARK):  # `mpi_ops` has others by now of those whose backward pass is a collective.
            replacements |= {id(each): function for each in (function.__wrapped__, getattr(mpi_ops, name, function))}
    for module_name, module in list(sys.modules.items()):
        # By its type: libraries of cffi and the like call themselves modules, and have no names of this kind.
        if issubclass(type(module), types.ModuleType) and not _of_library(module_name):
            names = object.__getattribute__(module, "__dict__")  # Without the import that a lazy module would make.
            for name, value in list(names.items()):
                replacement = replacements.get(id(value))
                if replacement is not None and replacement is not value:
                    names[name] = replacement
                    logger.debug("%s.%s is now the function of star_hvd", module_name, name)


replace_in_horovod({name: globals()[name] for name in __all__})
rebind_imported()
