"""The end of `grouped`: members that leave at different moments do not wait for each other for ever.

Ranks are threads, their collective sums in memory as soon as all have submitted a tensor under a name.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from scheduler.plan.plan import Plan
from scheduler.rules.server_rule import Push, ServerRule, Update
from star_hvd.engine.collective import poll_for
from star_hvd.engine.device import Streams
from star_hvd.errors import DeadlineError, RankLostError
from star_hvd.modes.grouped import GroupSteps
from star_hvd.modes.ps_worker import Outcome

DEADLINE_S = 120.0


class Meeting:
    """What the collectives of all members share: sums under way, by name and how often it was used."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.lock = threading.Lock()
        self.given: dict[tuple[str, int], list[torch.Tensor]] = {}


class MemoryCollective:
    """One member's collective."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._uses: dict[str, itertools.count[int]] = {}
        self._handles: list[tuple[tuple[str, int], torch.Tensor]] = []

    def submit(self, name: str, tensor: torch.Tensor) -> int:
        if tensor.dtype == torch.bfloat16:
            raise ValueError("Tensor type torch.BFloat16Tensor is not supported.")  # As Horovod does.
        key = (name, next(self._uses.setdefault(name, itertools.count())))
        with self._meeting.lock:
            self._meeting.given.setdefault(key, []).append(tensor.clone())
        self._handles.append((key, tensor))
        return len(self._handles) - 1

    def hurry(self) -> None:
        pass

    def poll(self, handle: int) -> bool:
        with self._meeting.lock:
            return len(self._meeting.given[self._handles[handle][0]]) == self._meeting.size

    def wait(self, handle: int, longest_s: float) -> bool:
        return poll_for(self, handle, longest_s)

    def finish(self, handle: int) -> None:
        key, tensor = self._handles[handle]
        tensor.copy_(torch.stack(self._meeting.given[key]).sum(dim=0))


class Served:
    """A client whose servers answer at once."""

    def __init__(self) -> None:
        self.version = 0
        self.pulls = 0

    def pull(self, deadline_s: float, **asks: Any) -> Any:
        self.pulls += 1
        return SimpleNamespace(kind="params", version=self.version, plan_id=1, params=[torch.ones(3)])


class Pushing(GroupSteps):
    """Without a replica: what it would write is kept."""

    def __init__(self, *args: Any, **common: Any) -> None:
        super().__init__(*args, **common)
        self.written: list[list[float]] = []

    def exchange(self, flat: torch.Tensor, weight: float | None = None) -> Outcome:
        return self._exchange([flat], [float(flat[-1])] if weight is None else [weight])

    def _write(self, outcome: Outcome, *, arriving: bool = False) -> None:
        self.written.append(outcome.params[0].tolist())


class Member(Pushing):
    """What its leader would push is kept too."""

    def __init__(self, *args: Any, **common: Any) -> None:
        super().__init__(*args, **common)
        self.pushed: list[tuple[list[float], int]] = []
        self.pushed_dtypes: list[torch.dtype] = []
        self.pushed_weights: list[float] = []

    def _push(self, flats: Sequence[torch.Tensor], weights: Sequence[float], *, count: int) -> Outcome:
        self.pushed.append((flats[0].tolist(), count))
        self.pushed_dtypes.append(flats[0].dtype)
        self.pushed_weights.extend(weights)
        return Outcome("params", 5, 1, [torch.full((3,), 7.0, dtype=flats[0].dtype)])


def member(
    rank: int,
    ranks: tuple[int, ...],
    meeting: Meeting | None,
    *,
    deadline_s: float = DEADLINE_S,
    engines: list[Any] | None = None,
    dtype: torch.dtype = torch.float32,
    kind: type[Any] = Member,
) -> Any:
    bucket = SimpleNamespace(new_flat=lambda: torch.zeros(4, dtype=dtype))
    plan = Plan.grouped(1 + max(ranks), [tuple(range(min(ranks))), ranks] if min(ranks) else [ranks]).replace(plan_id=1)
    engine = SimpleNamespace(
        rank=rank, prefix="s", plan=plan, step=0, failure=None, applier=SimpleNamespace(buckets=[bucket]),
        streams=Streams([]),
    )
    engine.fail = lambda error, unseen=False: setattr(engine, "failure", error)
    if engines is not None:
        engines.append(engine)
    return kind(
        engine,
        plan,
        Served(),
        None if meeting is None else MemoryCollective(meeting),
        ranks,
        deadline_s=deadline_s,
        on_step=lambda info: None,
        on_notes=lambda notes: None,
        plan_of=lambda plan_id: None,
        same_session=lambda one, other: False,
    )


def end(steps: Sequence[Pushing]) -> None:
    """All inactive members leave together."""
    threads = [threading.Thread(target=each.shutdown, daemon=True) for each in steps]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S / 2.0)
    assert not any(thread.is_alive() for thread in threads) and all(each.over for each in steps)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("seed", range(5))
def test_members_that_end_at_different_moments_all_end(size: int, seed: int) -> None:
    ranks, meeting, chance = tuple(range(size)), Meeting(size), random.Random(seed)
    steps = [member(rank, ranks, meeting) for rank in ranks]
    met = threading.Barrier(size)
    ended: list[int] = []

    def close(rank: int, waits_s: list[float]) -> None:
        time.sleep(waits_s[0])
        steps[rank].set_inactive(True)
        met.wait(DEADLINE_S)  # What `CoordinatorClient.await_all` does.
        time.sleep(waits_s[1])
        steps[rank].shutdown()
        time.sleep(waits_s[2])
        steps[rank].set_inactive(False)
        ended.append(rank)

    threads = [
        threading.Thread(target=close, args=(rank, [chance.uniform(0.0, 0.03) for _ in range(3)]), daemon=True)
        for rank in ranks
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S / 2.0)
    assert sorted(ended) == list(ranks), "a member waits for one that has gone"
    assert all(each.over for each in steps)
    assert all(len(sums) == size for sums in meeting.given.values()), "a step was begun that not all take part in"


def test_a_thread_that_waited_for_its_turn_begins_no_step_behind_the_last_one() -> None:
    """The proxy's step, from before this rank was back, is the one in which the leader learns of the end."""
    ranks, meeting, engines = (0, 1), Meeting(2), list[Any]()
    steps = [member(rank, ranks, meeting, engines=engines) for rank in ranks]
    steps[1].set_inactive(True)
    while not meeting.given:
        time.sleep(0.001)
    steps[1].set_inactive(False)
    back = threading.Thread(target=steps[1].catch_up, daemon=True)
    back.start()
    time.sleep(0.05)  # It waits for its turn; without that the test passes too.
    engines[0].plan = engines[0].plan.replace(plan_id=2)
    steps[0].drain()
    back.join(DEADLINE_S / 2.0)
    assert not back.is_alive() and engines[1].failure is None, "it waits for a member that has gone"
    assert steps[0].over and steps[1].over
    assert all(len(sums) == 2 for sums in meeting.given.values())


def test_without_members_at_the_end_of_their_loops_nothing_ends() -> None:
    ranks, meeting = (0, 1), Meeting(2)
    steps = [member(rank, ranks, meeting) for rank in ranks]
    for each in steps:
        each.set_inactive(True)
    ending = threading.Thread(target=steps[0].shutdown, daemon=True)  # Rank 1 is at the end of an epoch only.
    ending.start()
    before = len(meeting.given)
    limit_s = time.monotonic() + DEADLINE_S
    while len(meeting.given) < before + 40 and time.monotonic() < limit_s:
        time.sleep(0.005)
    assert len(meeting.given) >= before + 40 and not any(each.over for each in steps)
    steps[1].shutdown()
    ending.join(DEADLINE_S)
    assert all(each.over for each in steps)


def test_an_inactive_group_reads_and_sums_no_parameters_until_a_member_wants_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While one rank evaluates and the others wait for it, the network and the processors are theirs."""
    ranks, meeting = (0, 1, 2), Meeting(3)
    pauses_s: list[float] = []
    wait = threading.Event.wait

    def noted(event: threading.Event, timeout: float | None = None) -> bool:
        pauses_s.append(timeout or 0.0)
        return wait(event, timeout)

    monkeypatch.setattr(threading.Event, "wait", noted)
    steps = [member(rank, ranks, meeting) for rank in ranks]
    for each in steps:
        each.set_inactive(True)
    limit_s = time.monotonic() + DEADLINE_S
    while len(meeting.given) < 20 and time.monotonic() < limit_s:
        time.sleep(0.05)
    client: Any = steps[0].client
    assert client.pulls == 0 and {name for name, _ in meeting.given} == {"s.gh", "s.gv"}
    # Two in each round, and every member rests between rounds: how many there are in a second depends on the machine.
    assert len(meeting.given) >= 20 and sum(pauses_s) >= 3 * 0.03 * (len(meeting.given) // 2)
    assert max(pauses_s) <= 0.2, "a member that comes back is not kept waiting"
    for rank in (1, 0):  # A member, and the leader.
        steps[rank].set_inactive(False)
        steps[rank].catch_up()
        steps[rank].set_inactive(True)
    assert client.pulls == 2 and [each.written for each in steps] == [[[1.0] * 3], [[1.0] * 3], []]
    end(steps)
    assert all(len(sums) == 3 for sums in meeting.given.values())


def test_a_gradient_is_summed_with_zeros_of_the_inactive_members() -> None:
    ranks, meeting = (0, 1, 2), Meeting(3)
    steps = [member(rank, ranks, meeting) for rank in ranks]
    for rank in (0, 2):
        steps[rank].set_inactive(True)
    for k in range(1, 4):
        time.sleep(0.02)
        outcome = steps[1].exchange(torch.full((4,), float(k)))
        assert outcome.kind == "params" and outcome.params[0].tolist() == [7.0] * 3
        assert steps[0].pushed[-1] == ([float(k)] * 4, 1)
    steps[1].set_inactive(True)
    end(steps)
    assert len(steps[0].pushed) == 3
    assert all(len(sums) == 3 for sums in meeting.given.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_gradients_of_any_type_are_summed_and_pushed_in_their_own(dtype: torch.dtype) -> None:
    """Horovod refuses bfloat16, which the servers expect where parameters have it."""
    ranks, meeting = (0, 1, 2), Meeting(3)
    steps = [member(rank, ranks, meeting, dtype=dtype) for rank in ranks]
    steps[2].set_inactive(True)
    with ThreadPoolExecutor(2) as pool:
        flats = [torch.full((4,), value, dtype=dtype) for value in (2.0, 3.0)]
        outcomes = list(pool.map(lambda rank: steps[rank].exchange(flats[rank]), (0, 1), timeout=DEADLINE_S))
    assert [outcome.params[0].tolist() for outcome in outcomes] == [[7.0] * 3] * 2
    assert steps[0].pushed == [([5.0] * 4, 2)] and steps[0].pushed_dtypes == [dtype]
    assert all(flat.tolist() == [value] * 4 for flat, value in zip(flats, (2.0, 3.0), strict=True)), "still the own"
    for each in steps[:2]:
        each.set_inactive(True)
    end(steps)


def test_the_weight_of_a_groups_bfloat16_gradients_is_not_rounded() -> None:
    """The servers divide by it; 257 is 256 in bfloat16 and 1.1 is 1.1015625."""
    meeting = Meeting(2)
    steps = [member(rank, (0, 1), meeting, dtype=torch.bfloat16) for rank in (0, 1)]
    with ThreadPoolExecutor(2) as pool:
        flats = [torch.full((4,), value, dtype=torch.bfloat16) for value in (257.0, 1.1)]
        list(pool.map(lambda rank: steps[rank].exchange(flats[rank], (257.0, 1.1)[rank]), (0, 1), timeout=DEADLINE_S))
    assert steps[0].pushed_dtypes == [torch.bfloat16] and steps[0].pushed_weights == [pytest.approx(258.1, rel=1e-6)]
    for each in steps:
        each.set_inactive(True)
    end(steps)


def test_a_group_acts_on_its_own_plan_until_it_has_met_for_the_last_time() -> None:
    """Or its process set would be taken for one that no rank needs."""
    meeting, engines = Meeting(2), list[Any]()
    both = [member(rank, (0, 1), meeting, engines=engines) for rank in (0, 1)]
    alone = member(0, (0,), None, engines=engines)
    assert [each.acts_on for each in (*both, alone)] == [1, 1, 1]
    for engine in engines:
        engine.plan = Plan.sync(2).replace(plan_id=2)
    assert [each.acts_on for each in both] == [1, 1], "they have to meet, to learn of the end together"
    assert alone.acts_on == 2
    threads = [threading.Thread(target=each.drain, daemon=True) for each in both]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert [each.acts_on for each in both] == [2, 2] and all(each.over for each in both)


def test_a_step_that_waits_for_another_of_its_own_rank_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    entered, goes_on = threading.Event(), threading.Event()

    def stuck(self: MemoryCollective, name: str, tensor: torch.Tensor) -> int:
        entered.set()
        assert goes_on.wait(DEADLINE_S), "inside the collective library"
        raise DeadlineError("the test is over")

    monkeypatch.setattr(MemoryCollective, "submit", stuck)
    steps = member(0, (0, 1), Meeting(2), deadline_s=0.2)
    steps.set_inactive(True)  # Its proxy takes part.
    assert entered.wait(DEADLINE_S)
    with pytest.raises(DeadlineError, match="before this one did not end within 0.2 s"):
        steps.drain()
    goes_on.set()


def test_a_leaders_read_ends_as_its_rank_fails() -> None:
    """While no member is active, the leader only reads from the servers; one of these may be gone with its rank."""
    engines: list[Any] = []
    leader = member(0, (0, 1), Meeting(1), engines=engines)  # The other member's sums are left out.

    def unanswered(deadline_s: float, *, check: Any, **asks: Any) -> None:
        engines[0].fail(RankLostError("rank 2 has left the job"))
        check()
        raise DeadlineError("the wait went on")

    client: Any = leader.client
    client.pull = unanswered
    with pytest.raises(RankLostError, match="rank 2"):
        leader.catch_up()


class Ruled(Served):
    """A client whose servers have the real rule, for a group that is the first of two."""

    def __init__(self) -> None:
        super().__init__()
        self.rule = ServerRule(Plan.grouped(3, [(0, 1), (2,)]), version=100)
        self.notes: list[dict[str, Any]] = []

    def push(self, *, step: int, version: int, weight: float, count: int, **unused: Any) -> None:
        (update,) = self.rule.push(Push(rank=0, step=step, version=version, weight=weight, count=count))
        assert isinstance(update, Update)
        self.notes = [{"ranks": [0], "damped": [part.damped for part in update.parts]}]

    def wait(self, deadline_s: float, *, whole: bool = True) -> Any:
        params = [torch.ones(3)]
        return SimpleNamespace(
            kind="params", version=self.rule.version, plan_id=1, params=params, notes=self.notes, applied=True
        )


def test_gradients_of_a_group_whose_leader_is_inactive_are_not_taken_for_stale() -> None:
    """They are computed on what the group got last, of which the leader's own step says nothing then."""
    meeting, engines = Meeting(2), list[Any]()
    leader, other = (member(rank, (0, 1), meeting, engines=engines, kind=Pushing) for rank in (0, 1))
    for engine in engines:
        engine.step, engine.own = 100, SimpleNamespace(steps=1, loss=0.0)
        engine.applier.hyper = SimpleNamespace(read=lambda groups: [])
        engine.applier.optimizer = SimpleNamespace(param_groups=[])
    leader.client = Ruled()
    leader.set_inactive(True)
    outcomes = [other.exchange(torch.ones(4)) for _ in range(20)]
    assert [each.version for each in outcomes] == list(range(101, 121))
    assert [each.damped for each in outcomes] == [0.0] * 20
    other.set_inactive(True)
    end([leader, other])


def test_the_end_of_a_group_whose_leader_does_not_learn_of_it_has_a_deadline() -> None:
    """A leader that is inactive and whose plan stays in force answers every step with "idle"."""
    meeting, engines = Meeting(2), list[Any]()
    leader = member(0, (0, 1), meeting, deadline_s=2.0, engines=engines)
    other = member(1, (0, 1), meeting, deadline_s=0.3, engines=engines)
    leader.set_inactive(True)
    stopped = threading.Timer(20.0, lambda: engines[1].fail(DeadlineError("the test is over")))
    stopped.start()
    with pytest.raises(DeadlineError, match=r"rank 1: the group of ranks \(0, 1\) did not end within 0.3 s; rank 0"):
        other.drain()
    stopped.cancel()
    leader.set_inactive(False)


def test_a_step_of_a_group_without_rank_0_points_to_the_log_of_its_first_rank() -> None:
    """Horovod names the missing ranks of a process set there."""
    with pytest.raises(DeadlineError, match="log of rank 2"):
        member(3, (2, 3), Meeting(2), deadline_s=0.2).exchange(torch.ones(4))
