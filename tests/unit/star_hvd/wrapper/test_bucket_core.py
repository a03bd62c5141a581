"""What happens between autograd's hooks and the engine: parts of a bucket on several streams, errors on the way."""

from __future__ import annotations

import functools
import re
import weakref
from collections.abc import Callable, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from horovod.torch import mpi_ops
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from scheduler.plan.mode_names import parse_mode
from scheduler.records import Plan
from star_hvd.channel.messages import base as m
from star_hvd.config import Config
from star_hvd.engine.applier import Applier
from star_hvd.engine.buckets import Bucket
from star_hvd.engine.device import PARTS, Streams
from star_hvd.engine.records import Result
from star_hvd.engine.step_engine import StepEngine
from star_hvd.errors import StarError
from star_hvd.input.feeding import Feeding
from star_hvd.input.microbatches import MicrobatchInHand
from star_hvd.modes.driver import StepDriver
from star_hvd.runtime import runtime
from star_hvd.wrapper import bucket_core
from star_hvd.wrapper.bucket_core import BucketCore
from tests.support.device_world import running
from tests.support.fake_device import CUDA0, FakeDevice

Hook = Callable[[torch.nn.Parameter], None]


class Run:
    """As much of a rank's runtime as an optimizer that makes no step asks for."""

    world_size, rank, in_hand, stopped = 1, 0, None, False
    mixed = False
    drivers: Mapping[int, StepDriver] = MappingProxyType({})
    feeding = Feeding(lambda loader: None)

    def __init__(self, give: Callable[[Bucket], None]) -> None:
        none: Any = None
        self.said: list[m.Message] = []
        self.driver = StepDriver(
            0, Config(), lambda message, urgent=True: self.said.append(message), none, str, lambda task: None
        )
        self.driver.give = give  # type: ignore[method-assign, assignment]

    def new_driver(self) -> StepDriver:
        return self.driver

    def attach(self, driver: StepDriver, engine: StepEngine, initial: Plan, plan: Plan | None, *, exact: bool) -> None:
        driver.engine, driver.switcher = engine, SimpleNamespace(active_mode=None)  # type: ignore[assignment]


class Hooked:
    """An optimizer's core, and the hooks with which autograd gives it gradients.

    Args:
        monkeypatch: Of the test.
        give: Gets a bucket that is full.
        device: The device of the parameters, None for the host.
        kind: The optimizer's class.
        plan: The user's plan.
        exact: Whether `auto` may choose only exact modes.
        config: The user's settings of this optimizer.

    Attributes:
        pair: The two parameters of the first bucket.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        give: Callable[[Bucket], None],
        device: FakeDevice | None = None,
        kind: type[torch.optim.SGD] = torch.optim.SGD,
        plan: Plan | None = None,
        exact: bool = False,
        config: Config | None = None,
    ) -> None:
        place = torch.device("cpu") if device is None else CUDA0
        params = [torch.nn.Parameter(torch.zeros(3, device=place)) for _ in range(8)]  # Four buckets.
        self.hooks: list[tuple[torch.Tensor, Hook]] = []
        monkeypatch.setattr(bucket_core, "same_on_all_ranks", lambda params, names: params)
        monkeypatch.setattr(torch.Tensor, "register_post_accumulate_grad_hook", lambda p, hook: self.register(p, hook))
        if device is not None:
            streams_of = functools.partial(Streams, backend=device)
            monkeypatch.setattr(
                bucket_core, "Applier", lambda *given, **named: Applier(*given, streams=streams_of(given[2]), **named)
            )
        self.inner = kind(params, lr=0.1)
        run: Any = Run(give)
        self.core = BucketCore(
            self.inner, kind, wrapped=weakref.ref(self.inner), passes=1, scale_by_ranks=False, fp16=False,
            sparse_as_dense=False, plan=plan, exact=exact, run=run, config=config, names={}, max_grad_norm=None,
        )  # fmt: skip
        self.pair = self.core.buckets[0].params
        assert len(self.pair) == 2

    def register(self, param: torch.Tensor, hook: Hook) -> Any:
        self.hooks.append((param, hook))
        return SimpleNamespace(remove=lambda: None)

    def gradient(self, param: torch.nn.Parameter) -> None:
        """Autograd has accumulated a gradient of ones."""
        param.grad = torch.ones_like(param)
        (hook,) = [hook for each, hook in self.hooks if each is param]
        hook(param)


def given_on_two_streams(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What a reduction finds of a bucket whose parameters are of parts of a model that run on streams of their own."""
    found: list[Any] = []
    hooked = Hooked(monkeypatch, lambda bucket: found.append(bucket.flat.clone()), device)
    device.finish()
    for name, param in zip(("tower 1", "tower 2"), hooked.pair, strict=True):
        with device.on(name):
            hooked.gradient(param)
    device.finish(device.stream("tower 2"))  # What the submission is behind, and nothing else.
    return found[0].inner.tolist()[:-1]  # type: ignore[no-any-return]


def test_a_bucket_is_given_when_the_gradients_of_all_streams_are_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as device:
        assert given_on_two_streams(device, monkeypatch) == [1.0] * 6
        assert PARTS in device.ordered
    with running(PARTS) as device:
        assert given_on_two_streams(device, monkeypatch) != [1.0] * 6


def test_a_batch_is_not_repeated_where_memory_ran_out_on_the_way_to_a_reduction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some of that bucket may be on its way: it must neither be given again nor be left out."""

    def give(bucket: Bucket) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    hooked = Hooked(monkeypatch, give)
    first, second = hooked.pair
    hooked.gradient(first)
    assert hooked.core.driver.whole_only() == ""
    with pytest.raises(torch.OutOfMemoryError):
        hooked.gradient(second)
    assert "handed to its reduction" in hooked.core.driver.whole_only()


@pytest.mark.parametrize("is_last", [False, True])
def test_each_optimizer_makes_one_step_with_a_micro_batch(monkeypatch: pytest.MonkeyPatch, is_last: bool) -> None:
    """Another optimizer's step with it, such as that of a critic, changes nothing."""
    critic, hooked = (Hooked(monkeypatch, lambda bucket: None) for _ in range(2))
    critic.core.run.in_hand = hooked.core.run.in_hand = MicrobatchInHand(8, 8.0, lambda: not is_last, 1.0)
    critic.gradient(critic.pair[0])
    assert critic.core.whole == is_last
    for _ in range(2):
        hooked.gradient(hooked.pair[0])
    assert hooked.core.whole == is_last
    for each in (critic, hooked):
        with pytest.raises(StarError, match="step"):
            each.gradient(each.pair[0])


@pytest.mark.parametrize("by_step", [False, True])
def test_after_a_second_start_the_optimizer_goes_on_in_the_new_world(
    monkeypatch: pytest.MonkeyPatch, by_step: bool
) -> None:
    """The stopped runtime knows neither the loaders' micro-batches nor the mode."""
    hooked = Hooked(monkeypatch, lambda bucket: None)
    old, new = hooked.core.run, Run(lambda bucket: None)
    monkeypatch.setattr(bucket_core, "same_on_all_ranks", lambda params, names, ordered=False: params)
    monkeypatch.setattr(runtime, "ensure", lambda config: new)
    monkeypatch.setattr(old, "stopped", True)
    monkeypatch.setattr(old, "in_training_thread", lambda: by_step, raising=False)
    assert hooked.core.whole and hooked.core.run is old, "as Horovod is not initialized"
    monkeypatch.setattr(mpi_ops, "is_initialized", lambda: True)
    if by_step:
        assert hooked.core.whole and hooked.core.attached_to(new)  # type: ignore[arg-type]
        return
    with pytest.raises(StarError, match="wrap it again"):  # A thread of autograd is no place to meet in.
        hooked.gradient(hooked.pair[0])
    monkeypatch.setattr(old, "in_training_thread", lambda: True)
    hooked.gradient(hooked.pair[0])
    assert hooked.core.attached_to(new) and hooked.core.pending  # type: ignore[arg-type]


@pytest.mark.parametrize("config", [None, Config(step_deadline_s=60.0)], ids=["no config", "a config"])
def test_after_a_second_start_the_optimizer_asks_only_for_settings_that_the_user_gave(
    monkeypatch: pytest.MonkeyPatch, config: Config | None
) -> None:
    """The defaults would count as settings, which differ from those of a loader that came first."""
    hooked, asked = Hooked(monkeypatch, lambda bucket: None, config=config), list[Config | None]()

    def ensure(config: Config | None) -> Run:
        asked.append(config)
        return Run(lambda bucket: None)

    monkeypatch.setattr(bucket_core, "same_on_all_ranks", lambda params, names, ordered=False: params)
    monkeypatch.setattr(runtime, "ensure", ensure)
    monkeypatch.setattr(hooked.core.run, "stopped", True)
    monkeypatch.setattr(hooked.core.run, "in_training_thread", lambda: True, raising=False)
    monkeypatch.setattr(mpi_ops, "is_initialized", lambda: True)
    hooked.gradient(hooked.pair[0])
    assert asked == [config]


# ---- others' steps, while this rank is in the middle of one ----------------------------------------------------------


class Stepping:
    """A rank of a job that was relaxed before, whose steps end as soon as it arrives.

    Attributes:
        core: The optimizer's core.
        inner: The optimizer.
        caught_up: Per call that brings the parameters to others' steps whether that is the end of this rank's own.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, kind: type[torch.optim.SGD] = torch.optim.SGD, **settings: Any
    ) -> None:
        hooked = Hooked(monkeypatch, lambda bucket: None, kind=kind, **settings)
        self.core, self.inner, self.hooked = hooked.core, hooked.inner, hooked
        self.caught_up: list[bool] = []
        self.ending = False
        self.connect(monkeypatch)

    def connect(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have the steps end in the world that the core is attached to."""
        self.driver, self.engine = self.core.driver, self.core.driver.engine
        driver: Any = self.driver
        driver.arrive = lambda *, manual: True
        driver.complete = lambda: Result(self.engine.step, [b.flat for b in self.core.buckets], None)
        driver.end_of_step = lambda *, was_late: self.caught_up.append(self.ending)
        monkeypatch.setattr(self.core.run, "note_step", lambda number: None, raising=False)
        monkeypatch.setattr(bucket_core.runtime, "current", lambda: self.core.run)

    def backward(self) -> None:
        for bucket in self.core.buckets:
            for param in bucket.params:
                self.hooked.gradient(param)

    def apply(self) -> None:
        self.ending = True
        self.core.apply()
        self.ending = False


def test_a_state_between_synchronize_and_step_is_that_of_before_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a newer one the mean of the step that waits to be applied would be added on top of it."""
    rank = Stepping(monkeypatch)
    rank.core.refresh_state()
    assert rank.caught_up == [False], "between two steps it is the newest"
    rank.caught_up.clear()
    rank.backward()
    rank.core.refresh_state()
    rank.core.synchronize(manual=True)
    rank.core.refresh_state()
    assert rank.caught_up == []
    rank.apply()
    assert rank.caught_up == [True]
    assert float(rank.hooked.pair[0].detach()[0]) == pytest.approx(-0.1)


def test_gradients_that_wait_for_a_step_are_dropped_when_a_state_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are of the parameters before: of a model that had diverged, say."""
    rank = Stepping(monkeypatch)
    for bucket in rank.core.buckets:
        bucket.flat.fill_(float("nan"))
        rank.engine.own.count_produced()
        rank.engine.late.keep(bucket, 1.0, 0)
    assert rank.engine.pending_weight == 1.0
    rank.core.state_loaded({})
    assert rank.engine.pending_weight == 0.0 and rank.engine.counters.dropped_weight == 1.0
    assert rank.engine.counters.produced_weight == pytest.approx(1.0)
    rank.core.state_loaded({})
    assert rank.engine.counters.drops == 1, "there is nothing to drop where no gradient waits"


def test_step_hooks_are_in_the_middle_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A meeting there leaves this rank where it is, and a checkpoint contains this step, though others made more."""
    rank = Stepping(monkeypatch)
    seen: list[tuple[str, bool, float]] = []

    def look(name: str) -> None:
        rank.core.refresh_state()
        seen.append((name, rank.driver.mid_step(), float(rank.hooked.pair[0].detach()[0])))

    rank.inner.register_step_pre_hook(lambda *_: look("pre"))
    rank.inner.register_step_post_hook(lambda *_: look("post"))
    rank.backward()
    rank.core.synchronize(manual=False)
    rank.apply()
    assert seen == [("pre", True, 0.0), ("post", True, pytest.approx(-0.1))]
    assert rank.caught_up == [True] and not rank.driver.mid_step()


def test_an_error_of_the_users_optimizer_ends_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Stepping(monkeypatch)

    def fails(*_: Any) -> None:
        raise ZeroDivisionError

    rank.inner.register_step_pre_hook(fails)
    rank.backward()
    rank.core.synchronize(manual=False)
    with pytest.raises(ZeroDivisionError):
        rank.apply()
    assert not rank.driver.mid_step()


def test_hooks_around_a_step_of_a_mode_run_once_and_the_last_ones_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Stepping(monkeypatch)
    refreshed: list[str] = []
    active = SimpleNamespace(over=False, refresh_state=lambda: refreshed.append("state"), give=lambda bucket: None)
    rank.driver.switcher.active_mode = active  # type: ignore[misc]
    seen: list[tuple[str, bool]] = []

    def step_in_mode(*, skip: bool) -> None:
        rank.engine.applier.step(None, hooks=False)  # As `local` does.
        seen.append(("step", rank.driver.mid_step()))

    monkeypatch.setattr(rank.driver, "step_in_mode", step_in_mode)
    rank.inner.register_step_pre_hook(lambda *_: seen.append(("pre", rank.driver.mid_step())))
    rank.inner.register_step_post_hook(lambda *_: seen.append(("post", rank.driver.mid_step())))
    of_all = [
        register_optimizer_step_pre_hook(lambda *_: seen.append(("pre of all", rank.driver.mid_step()))),
        register_optimizer_step_post_hook(lambda *_: seen.append(("post of all", rank.driver.mid_step()))),
    ]
    rank.backward()
    rank.core.synchronize(manual=False)
    rank.core.refresh_state()
    assert refreshed == ["state"], "servers' state is newer than this rank's, wherever it asks"
    active.over = True
    rank.core.refresh_state()
    assert refreshed == ["state"] and rank.driver.active_mode is active, "modes change at the end of a step"
    try:
        rank.apply()
    finally:
        for each in of_all:
            each.remove()
    assert seen == [("pre of all", True), ("pre", True), ("step", True), ("post", False), ("post of all", False)]


class Counting(torch.optim.SGD):
    """Counts its steps in `param_groups`, as apex's `FusedAdam` does."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
        return super().step(closure)


@pytest.mark.parametrize(("kind", "pinned"), [(Counting, True), (torch.optim.SGD, False)])
def test_an_optimizer_with_state_in_its_groups_is_pinned(
    monkeypatch: pytest.MonkeyPatch, kind: type[torch.optim.SGD], pinned: bool
) -> None:
    rank = Stepping(monkeypatch, kind)
    reasons: list[str] = []
    monkeypatch.setattr(rank.driver, "pin", reasons.append)
    rank.backward()
    rank.core.synchronize(manual=False)
    rank.apply()
    assert len(reasons) == pinned and all("Counting" in text and "'step'" in text for text in reasons)


class Remembering(torch.optim.SGD):
    """Keeps something per parameter, from its step `first` on."""

    kept: Any
    first = 1

    def step(self, closure: Any = None) -> Any:
        for param in self.param_groups[0]["params"]:
            entry = self.state[param]
            entry["made"] = entry.get("made", 0) + 1
            if entry["made"] >= self.first:
                entry["kept"] = self.kept
        return super().step(closure)


@pytest.mark.parametrize("first", [1, 2])
@pytest.mark.parametrize(("kept", "reason"), [
    ([1.0], "'kept' is a list"), ({}, "'kept' is a dict"), (torch.ones(1, dtype=torch.complex64), "torch.complex64"),
    (torch.ones(1, dtype=torch.uint8), "averaged in local.* 'kept' is a torch.uint8 tensor"), (3, None), (None, None),
    (torch.tensor(True), "averaged in local.* 'kept' is a torch.bool tensor"), (torch.tensor(3), None),
])  # fmt: skip
def test_an_optimizer_whose_state_cannot_be_sent_or_averaged_is_pinned(
    monkeypatch: pytest.MonkeyPatch, kept: Any, reason: str | None, first: int
) -> None:
    """The first rank that is late would otherwise ask for it until its deadline, or `local` leave ranks unequal."""
    monkeypatch.setattr(Remembering, "kept", kept, raising=False)
    monkeypatch.setattr(Remembering, "first", first)
    rank = Stepping(monkeypatch, Remembering)
    reasons: list[str] = []
    monkeypatch.setattr(rank.driver, "pin", reasons.append)
    for _ in range(first):
        rank.backward()
        rank.core.synchronize(manual=False)
        assert reasons == []
        rank.apply()
    assert len(reasons) == (reason is not None)
    assert all(re.search(str(reason), text) and "Remembering" in text for text in reasons)


@pytest.mark.parametrize(("mode", "exact", "pinned"), [
    ("local(2)", False, True), ("partial(1)", False, False), ("auto", True, False),
])  # fmt: skip
def test_state_that_only_cannot_be_averaged_is_possible_without_local(
    monkeypatch: pytest.MonkeyPatch, mode: str, exact: bool, pinned: bool
) -> None:
    """A late rank fetches it."""
    monkeypatch.setattr(Remembering, "kept", torch.ones(1, dtype=torch.uint8), raising=False)
    monkeypatch.setattr(Run, "world_size", 2)
    rank = Stepping(monkeypatch, Remembering, plan=parse_mode(mode, 2), exact=exact)
    reasons: list[str] = []
    monkeypatch.setattr(rank.driver, "pin", reasons.append)
    rank.backward()
    rank.core.synchronize(manual=False)
    rank.apply()
    assert len(reasons) == pinned


def test_an_optimizer_whose_state_cannot_be_sent_is_pinned_in_every_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """An elastic reset makes a driver that knows of nothing, and servers may make the first steps in its world."""
    monkeypatch.setattr(Remembering, "kept", [1.0], raising=False)
    rank = Stepping(monkeypatch, Remembering)
    monkeypatch.setattr(bucket_core, "same_on_all_ranks", lambda params, names, ordered=False: params)
    monkeypatch.setattr(StepDriver, "step_in_mode", lambda self, *, skip: None)
    at_servers: Any = SimpleNamespace(over=False, give=lambda bucket: None)
    for world, modes in enumerate([[None], [None], [at_servers, None]]):
        reasons: list[str] = []
        monkeypatch.setattr(rank.driver, "pin", reasons.append)
        rank.inner.state.clear()
        for mode in modes:
            rank.driver.switcher.active_mode = mode  # type: ignore[misc]
            for _ in range(3):
                rank.backward()
                rank.core.synchronize(manual=False)
                rank.apply()
        assert reasons and all("'kept' is a list" in text for text in reasons), world
        rank.core.restart(Run(lambda bucket: None))  # type: ignore[arg-type]
        rank.connect(monkeypatch)


# ---- step hooks that change gradients or parameters ---------------------------------------------------------------


@pytest.mark.parametrize("hooked", [True, False])
def test_steps_with_hooks_in_front_are_not_replayed_by_helpers(monkeypatch: pytest.MonkeyPatch, hooked: bool) -> None:
    """A helper applies the mean as it is; a rank that is late gets the state instead."""
    rank = Stepping(monkeypatch)
    arrived: list[bool] = []
    monkeypatch.setattr(rank.driver, "arrive", lambda *, manual: arrived.append(manual) or True)
    if hooked:
        rank.inner.register_step_pre_hook(lambda *_: None)
    rank.backward()
    rank.core.synchronize(manual=False)
    assert arrived == [hooked]


def test_a_gradient_that_a_hook_replaces_is_the_one_that_a_mode_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Stepping(monkeypatch)
    rank.driver.switcher.active_mode = SimpleNamespace(give=lambda bucket: None)  # type: ignore[misc, assignment]
    pushed: list[torch.Tensor] = []

    def halve(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for param in optimizer.param_groups[0]["params"]:
            param.grad = param.grad * 0.5

    rank.inner.register_step_pre_hook(halve)
    monkeypatch.setattr(
        rank.driver, "step_in_mode", lambda *, skip: pushed.extend(b.flat[:-1].clone() for b in rank.core.buckets)
    )
    rank.backward()
    rank.core.synchronize(manual=False)
    rank.apply()
    assert pushed and all(bool((values == 0.5).all()) for values in pushed)


def test_a_gradient_that_is_synchronized_before_the_step_is_given_to_servers_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`step()` without `skip_synchronize`: it was weighed twice, also if a hand-written clipping came in between."""
    rank = Stepping(monkeypatch)
    given: list[int] = []
    rank.driver.switcher.active_mode = SimpleNamespace(  # type: ignore[misc, assignment]
        give=lambda bucket: given.append(bucket.index)
    )
    monkeypatch.setattr(rank.driver, "give", rank.driver.switcher.active_mode.give)
    pushed: list[torch.Tensor] = []
    monkeypatch.setattr(
        rank.driver, "step_in_mode", lambda *, skip: pushed.extend(b.flat[:-1].clone() for b in rank.core.buckets)
    )
    counted: list[None] = []
    monkeypatch.setattr(rank.core.run, "note_step", lambda number: counted.append(None))
    for number in (1, 2):
        rank.backward()
        rank.core.synchronize(manual=True)
        for param in rank.inner.param_groups[0]["params"]:
            param.grad = param.grad * 0.25
        rank.core.synchronize(manual=False)
        rank.apply()
        assert given == sorted(given[: len(rank.core.buckets)]) * number
        assert len(counted) == number, "one step each"
    assert len(pushed) == 2 * len(rank.core.buckets) and all(bool((values == 0.25).all()) for values in pushed)


@pytest.mark.parametrize("passes", [1, 2])
def test_a_late_gradient_that_is_synchronized_before_the_step_is_kept_once(
    monkeypatch: pytest.MonkeyPatch, passes: int
) -> None:
    """`step()` without `skip_synchronize` gave it again: a part was kept twice, one from a buffer under reduction."""
    rank = Stepping(monkeypatch)
    monkeypatch.setattr(rank.driver, "arrive", lambda *, manual: False)
    given: list[int] = []
    monkeypatch.setattr(rank.driver, "give", lambda bucket: given.append(bucket.index))
    rank.core.set_passes(passes)
    everything = sorted(bucket.index for bucket in rank.core.buckets)
    for number in (1, 2):
        for _ in range(passes):
            rank.backward()
        rank.core.synchronize(manual=True)
        rank.core.synchronize(manual=False)
        assert sorted(given) == sorted(everything * number) and rank.driver.mid_step()
        rank.apply()
    assert rank.caught_up == [True] * 2
    for _ in range(passes):
        rank.backward()
    rank.core.synchronize(manual=True)
    rank.backward()  # One pass of the next step, whole or not, is no repetition.
    rank.core.synchronize(manual=False)
    assert sorted(given) == sorted(everything * 4)


@pytest.mark.parametrize("where", ["between", "hook"])
def test_clipping_by_hand_on_a_late_rank_writes_into_no_buffer(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """A bucket that this rank submitted before the step closed without it is being reduced meanwhile, in place."""
    rank = Stepping(monkeypatch)
    monkeypatch.setattr(rank.driver, "arrive", lambda *, manual: False)
    params = rank.inner.param_groups[0]["params"]
    clipped: list[float] = []

    def clip(*_: Any) -> None:
        clipped.append(float(torch.nn.utils.clip_grad_norm_(params, 0.1)))

    if where == "hook":
        rank.inner.register_step_pre_hook(clip)
    for _ in range(2):
        rank.backward()
        rank.core.synchronize(manual=where == "between")
        if where == "between":
            clip()
        rank.apply()
        assert all(bool((bucket.flat[:-1] == 1.0).all()) for bucket in rank.core.buckets)
        assert all(param.grad.abs().sum() < 0.3 for param in params)
    assert clipped == [pytest.approx(24**0.5)] * 2, "the program sees its own gradient"
    monkeypatch.setattr(rank.driver, "arrive", lambda *, manual: True)
    rank.backward()
    rank.core.synchronize(manual=where == "between")
    assert all(bucket.shows(at) for bucket in rank.core.buckets for at in range(len(bucket.params)))


def test_a_late_gradient_that_nothing_changes_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Stepping(monkeypatch)
    monkeypatch.setattr(rank.driver, "arrive", lambda *, manual: False)
    rank.backward()
    rank.core.synchronize(manual=False)
    assert all(bucket.shows(at) for bucket in rank.core.buckets for at in range(len(bucket.params)))


def test_a_bucket_that_servers_still_answer_is_awaited_before_it_is_overwritten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If a server dies before its answer is here, the buffer is sent again."""
    rank = Stepping(monkeypatch)
    rank.driver.switcher.active_mode = SimpleNamespace(give=lambda bucket: None)  # type: ignore[misc, assignment]
    buckets, gates = rank.core.buckets, rank.driver.gates
    assert gates is not None and len(buckets) > 1
    for bucket in buckets:
        bucket.flat.fill_(5.0)  # As pushed in the step before.
    awaited: dict[int, list[float]] = {}
    gates.wait = lambda index: awaited.setdefault(index, buckets[index].flat[:-1].tolist())  # type: ignore[assignment]
    used, unused = buckets[0], buckets[1:]
    for param in used.params:
        param.grad = torch.ones_like(param)
    rank.core.synchronize(manual=False)
    assert all(awaited[bucket.index] == [5.0] * bucket.numel for bucket in unused)
    assert all(bucket.flat[:-1].tolist() == [0.0] * bucket.numel for bucket in unused)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("what", ["clamps", "looks", "none"])
def test_a_hook_that_changes_parameters_behind_the_step_is_the_programs_own_change(
    monkeypatch: pytest.MonkeyPatch, what: str, late: bool
) -> None:
    rank = Stepping(monkeypatch)
    reasons: list[str] = []
    monkeypatch.setattr(rank.driver, "pin", reasons.append)
    monkeypatch.setattr(rank.driver, "arrive", lambda *, manual: not late)

    def clamp(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for param in optimizer.param_groups[0]["params"]:
            param.data.clamp_(-0.01, 0.01) if what == "clamps" else param.sum()

    def caught_up(*, was_late: bool) -> None:
        with rank.engine.replica.writing(), torch.no_grad():
            for param in rank.inner.param_groups[0]["params"]:
                param.sub_(0.1)

    if what != "none":
        rank.inner.register_step_post_hook(clamp)
    own = rank.driver.end_of_step
    for follows in (True, False, False):  # Others' steps are applied behind the first one.
        monkeypatch.setattr(rank.driver, "end_of_step", caught_up if late or follows else own)
        rank.backward()
        rank.core.synchronize(manual=False)
        rank.apply()
    assert bool(reasons) == (what == "clamps") and all("changes parameters" in reason for reason in reasons)
    hooks = rank.inner.__dict__["_optimizer_step_post_hooks"]
    assert len(hooks) == (what != "none"), "only the program's own stay"


# ---- why no step can overlap -----------------------------------------------------------------------------------------


class NotByParameter(torch.optim.SGD):
    """A class of which nothing is known: its parameters may depend on each other."""


def test_why_no_step_can_overlap_is_known_though_nobody_asked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`explain` advised such an optimizer to take overlap='auto', which then was refused."""
    driver = Hooked(monkeypatch, lambda bucket: None, kind=NotByParameter).core.driver
    assert driver.no_overlap.startswith("NotByParameter is not known to update") and not driver.asks_overlap
    assert caplog.records == [], "it is no news to a program that did not ask"
    driver = Hooked(monkeypatch, lambda bucket: None).core.driver
    assert driver.no_overlap == "" and not driver.asks_overlap


def test_why_the_last_step_could_not_have_overlapped_is_known_though_nobody_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank = Stepping(monkeypatch)
    for whole in ("a GradScaler decides after the reduction whether to step", None):
        rank.backward()
        rank.core.synchronize(manual=False, whole=whole)
        rank.apply()
        assert rank.driver.no_overlap == (whole or "")
    rank.backward()
    rank.core.synchronize(manual=True)
    assert rank.driver.no_overlap == bucket_core.BY_HAND


def test_the_coordinator_hears_the_sizes_of_added_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backbone that is unfrozen: what is sent in a step is no longer the head's."""
    core = Hooked(monkeypatch, lambda bucket: None).core
    driver, run = core.driver, core.run
    assert isinstance(run, Run)
    driver.reporter.start(driver.engine)
    monkeypatch.setattr(driver.switcher, "parameters_added", lambda: None, raising=False)
    before = sum(bucket.flat.nbytes for bucket in core.buckets)
    core.add_params([torch.nn.Parameter(torch.zeros(1 << 20))])
    (sizes,) = run.said
    assert isinstance(sizes, m.GradientSizes) and sizes.step == driver.engine.step
    added = core.buckets[-1].flat.nbytes
    assert sizes.gradient_bytes == before + added and added >= 4 << 20
    assert sizes.edge_part == pytest.approx(added / sizes.gradient_bytes)
