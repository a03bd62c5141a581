"""Programs that use `horovod.torch` beside `star_hvd`: which functions they get, and when."""

from __future__ import annotations

import _thread
import collections
import contextlib
import inspect
import logging
import os
import pickle
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import horovod.torch
import pytest
from horovod.common import process_sets as horovod_sets
from horovod.torch import mpi_ops

import star_hvd
from star_hvd import functions
from star_hvd.channel.messages.joins import JoinedRanks
from star_hvd.errors import StarError
from star_hvd.input.joined import Joined
from star_hvd.input.program_waits import ProgramWaits
from star_hvd.runtime import runtime
from tests.support.plain import horovod as horovod_plain

NAMES = sorted(functions.__all__)


class Running:
    """A runtime as far as it says whether there is an optimizer."""

    def __init__(self, *, trains: bool) -> None:
        self.trains = trains
        self.loops = types.SimpleNamespace(note_collective=lambda name, of_all: None)
        self.program_waits = ProgramWaits(lambda message, *, urgent=True: None)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Who was called, with `allreduce` and `shutdown` replaced as on import."""
    found: list[str] = []
    kept = {name: getattr(horovod.torch, name) for name in ("allreduce", "shutdown")}

    def noting(who: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: found.append(f"{who}{args}{kwargs or ''}")

    for name in kept:
        setattr(horovod.torch, name, noting("theirs"))
    ours = {name: noting("ours") for name in kept}
    functions.replace_in_horovod(ours)
    yield found
    for name, function in kept.items():
        setattr(horovod.torch, name, function)


def _call_from(module: str, name: str = "allreduce") -> None:
    exec(f"import horovod.torch as hvd\nhvd.{name}(1)", {"__name__": module})


@pytest.mark.parametrize("name", NAMES)
def test_every_function_looks_like_horovods(name: str) -> None:
    function = getattr(horovod.torch, name)
    assert function is not getattr(horovod_plain, name) and function is not getattr(star_hvd, name)
    assert inspect.signature(function) == inspect.signature(getattr(horovod_plain, name))
    assert function.__doc__ == getattr(horovod_plain, name).__doc__
    assert pickle.loads(pickle.dumps(function)) is function


def test_horovods_own_modules_keep_theirs() -> None:
    for module in (mpi_ops, horovod.torch.functions, horovod.torch.optimizer, horovod.torch.elastic):
        replaced = [getattr(horovod.torch, name) for name in NAMES]
        assert not [name for name, value in vars(module).items() if any(value is each for each in replaced)]


def test_without_an_optimizer_nothing_changes(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    _call_from("program")
    monkeypatch.setattr(runtime, "current", lambda: Running(trains=False))  # A loader alone.
    _call_from("program")
    assert calls == ["theirs(1,)", "theirs(1,)"]
    _call_from("program", "shutdown")
    assert calls[2:] == ["ours(1,)"], "its threads end before Horovod does"


def test_with_an_optimizer_programs_get_ours(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "current", lambda: Running(trains=True))
    for module in ("__main__", "program.metrics", "horovod_helpers", "star_hvd.runtime.x", "horovod.spark.x"):
        _call_from(module)
    assert calls == ["ours(1,)"] * 3 + ["theirs(1,)"] * 2


def test_a_call_from_outside_of_python_is_the_programs(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit handlers and hooks of autograd's threads have no caller."""
    monkeypatch.setattr(runtime, "current", lambda: Running(trains=True))
    _thread.start_new_thread(horovod.torch.allreduce, (1,))
    limit_s = time.monotonic() + 60.0
    while not calls and time.monotonic() < limit_s:
        time.sleep(0.01)
    assert calls == ["ours(1,)"]


def test_replaced_twice_is_replaced_once(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "current", lambda: Running(trains=True))
    functions.replace_in_horovod({"allreduce": lambda *args: calls.append("newer")})
    _call_from("program")
    monkeypatch.setattr(runtime, "current", lambda: None)
    _call_from("program")
    assert calls == ["newer", "theirs(1,)"]


@pytest.mark.parametrize("where", ["horovod.torch", "mpi_ops"])
def test_names_imported_before_are_bound_again(
    where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    early = types.ModuleType("early_helper")
    source: Any = horovod_plain if where == "horovod.torch" else mpi_ops
    vars(early).update(reduce=source.allreduce, broadcast_object=horovod_plain.broadcast_object, size=mpi_ops.size)
    monkeypatch.setitem(sys.modules, "early_helper", early)
    monkeypatch.setitem(sys.modules, "not a module", object())  # type: ignore[arg-type]
    before = {name: getattr(mpi_ops, name) for name in NAMES if hasattr(mpi_ops, name)}
    with caplog.at_level(logging.DEBUG, "star_hvd"):
        functions.rebind_imported()
    bound: Any = early
    assert bound.reduce is horovod.torch.allreduce and bound.broadcast_object is horovod.torch.broadcast_object
    assert bound.size == mpi_ops.size
    assert "early_helper.reduce is now the function of star_hvd" in caplog.text
    assert before == {name: getattr(mpi_ops, name) for name in before}
    assert functions.horovod_functions.broadcast_object is horovod_plain.broadcast_object


def test_what_calls_itself_a_module_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        """As libraries that cffi has opened."""

        __slots__ = ()
        __class__ = types.ModuleType  # type: ignore[assignment]

    library = Library()
    assert isinstance(library, types.ModuleType)
    monkeypatch.setitem(sys.modules, "opened_library", library)
    functions.rebind_imported()


def test_a_lazy_module_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lazy(types.ModuleType):
        def __getattribute__(self, name: str) -> Any:
            raise AssertionError(f"{name} of a lazy module was looked up")

    monkeypatch.setitem(sys.modules, "lazy", Lazy("lazy"))
    functions.rebind_imported()


def test_a_module_that_is_loaded_again_wraps_horovods_functions() -> None:
    script = (
        "import importlib; from star_hvd import functions; importlib.reload(functions); import horovod.torch as hvd; "
    )
    script += "print([n for n in functions.__all__ if hasattr(getattr(hvd, n).__wrapped__, '__wrapped__')])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_job_of_one_rank_that_mpirun_started_with_others_is_told_by_init() -> None:
    script = "import star_hvd as hvd; hvd.init(); hvd.shutdown()"
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD")}
    environ |= {"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_RANK": "0"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environ)
    assert "mpirun started 8 processes (OMPI_COMM_WORLD_SIZE), but each is a job of its own" in done.stderr


def test_what_a_broadcast_writes_is_not_the_programs_own_change(monkeypatch: pytest.MonkeyPatch) -> None:
    did: list[str] = []
    driver = types.SimpleNamespace(
        dropped=False,
        finish_step=lambda: did.append("finish"),
        loaded=types.SimpleNamespace(keep=lambda: None, put_back=lambda: did.append("put back")),
        timer=types.SimpleNamespace(add_outside=lambda seconds: None),
        forget_writes=lambda: did.append("forget"),
    )
    run = types.SimpleNamespace(
        trains=True, mixed=False, drivers={0: driver}, user_calls=collections.Counter(), finish_steps=lambda: None,
        loops=types.SimpleNamespace(note_collective=lambda name, of_all: None),
        program_waits=ProgramWaits(lambda message, *, urgent=True: None),
        in_training_thread=lambda: True, joined=types.SimpleNamespace(during=lambda what: contextlib.nullcontext()),
    )  # fmt: skip
    monkeypatch.setattr(runtime, "current", lambda: run)
    star_hvd.broadcast_parameters({}, root_rank=0)
    assert did == ["finish", "put back", "forget"]


class Keeper:
    """Passes on to Horovod at once."""

    add_users = staticmethod(horovod_sets.add_process_set)
    remove_users = staticmethod(horovod_sets.remove_process_set)


class Relaxed(Running):
    """A runtime whose ranks are at different steps; notes what this rank is inactive in."""

    mixed = meets = True

    def __init__(self, joined: list[int]) -> None:
        super().__init__(trains=True)
        self.user_calls: collections.Counter[str] = collections.Counter()
        self.met: list[str] = []
        self.services = types.SimpleNamespace(sets=Keeper())
        self.joined = Joined(lambda message: None, lambda: None, lambda what: None, self.user_calls)
        self.joined.on_message(JoinedRanks(joined))

    def finish_steps(self) -> None:
        pass

    @contextlib.contextmanager
    def meeting(self, reason: str, *, in_pass: bool) -> Iterator[None]:
        self.met.append(reason)
        yield
        self.met.append("left")


class Sets:
    """Horovod as far as it changes process sets."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []

    def _add_process_set_impl(self, ranks: list[int]) -> int:
        self.calls.append(ranks)
        return 3

    def _remove_process_set_impl(self, number: int) -> int:
        self.calls.append([number])
        return number


def test_process_sets_are_changed_in_a_meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks call both, members or not; the others must not wait for the gradients of those inside."""
    run, sets = Relaxed(joined=[]), Sets()
    monkeypatch.setattr(runtime, "current", lambda: run)
    monkeypatch.setattr(horovod_sets, "_basics", sets)
    made = star_hvd.add_process_set([1, 0])
    assert made.ranks == [0, 1] and made.process_set_id == 3 and run.met == ["add_process_set", "left"]
    assert star_hvd.remove_process_set(process_set=made) and made.process_set_id is None
    assert run.met[2:] == ["remove_process_set", "left"] and sets.calls == [[0, 1], [3]]
    assert not star_hvd.remove_process_set(made) and len(run.met) == 4, "Horovod, too, answers at once"
    assert not star_hvd.remove_process_set(star_hvd.global_process_set) and len(run.met) == 4


def test_no_process_set_is_added_while_ranks_are_in_join(monkeypatch: pytest.MonkeyPatch) -> None:
    run, sets = Relaxed(joined=[2]), Sets()
    monkeypatch.setattr(runtime, "current", lambda: run)
    monkeypatch.setattr(horovod_sets, "_basics", sets)
    with pytest.raises(StarError, match=r"hvd\.add_process_set was called while ranks \[2\] are in hvd\.join"):
        star_hvd.add_process_set(star_hvd.ProcessSet([0, 1]))
    assert sets.calls == []
