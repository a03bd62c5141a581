"""Batches that run out of memory: which errors are caught, what is delivered after one, and what memory is freed."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import gc
import random
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from horovod.torch.sync_batch_norm import SyncBatchNorm
from torch.utils.data.dataloader import default_collate

from scheduler.records import parse_mode
from star_hvd.input.feeding import Feeding
from star_hvd.input.microbatches import MicrobatchInHand
from star_hvd.runtime.asked_plans import AskedPlans
from star_hvd.runtime.memory_limits import MemoryLimits
from star_hvd.runtime.out_of_memory import Repeats, catch_out_of_memory, cut_batch

Point = collections.namedtuple("Point", "x name")  # What torch's collate function knows.


class Run:
    """What `Repeats` needs of a runtime."""

    def __init__(self, *, world_size: int = 4, whole_only: str = "", equal_batches: str = "", net: Any = None) -> None:
        self.net = net or torch.nn.Linear(1, 1)
        applier = SimpleNamespace(optimizer=torch.optim.SGD(self.net.parameters(), lr=1.0))
        self.memory, self.world_size, self.rank = MemoryLimits(0), world_size, 1
        self.steps_ended, self.reference_samples = 0, 8.0
        self.in_hand: Any = None
        self.sent: list[Any] = []
        self.agent = SimpleNamespace(send=self.sent.append)
        self.forgotten = 0
        self.used: list[int] = []  # Loaders whose batch was delivered in parts.
        self.feeding = Feeding(lambda loader: None)
        self.feeding.used = self.used.append  # type: ignore[method-assign]
        self.drivers = {
            0: SimpleNamespace(
                whole_only=lambda: whole_only,
                hold_gradients=frozenset,
                forget_parts=lambda: self._forget(),
                equal_batches=equal_batches,
                engine=SimpleNamespace(applier=applier),
            )
        }

    def _forget(self) -> None:
        self.forgotten += 1


def _loader(repeats: Repeats) -> Any:
    return SimpleNamespace(repeats=repeats)


def _deliver(run: Any, repeats: Repeats, numbers: list[int]) -> Any:
    return repeats.deliver(run, 0, len(numbers), numbers, lambda start, stop: numbers[start:stop])


def _noted(run: Any, repeats: Repeats, numbers: list[int]) -> Any:
    """Deliver a batch that the runtime notes, as the loader lets it."""
    run.feeding.note(0, 1.0)
    return _deliver(run, repeats, numbers)


def test_every_sample_is_in_one_part_that_fits_and_the_last_one_makes_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever fits: which changes as memory is fragmented, so that later parts may fail where earlier ones did not."""
    monkeypatch.setattr("gc.collect", int)  # It looks at all that the tests have imported, thousands of times here.
    rng = random.Random(4)
    for _ in range(200):
        run, repeats, size = Run(), Repeats(), rng.randint(1, 40)
        for _ in range(3):
            numbers, done, weight, last = list(range(size)), [], 0.0, []
            for part in _deliver(run, repeats, numbers):
                with catch_out_of_memory(_loader(repeats)):
                    if len(part) > max(1, rng.randint(size // 4, size)):
                        raise torch.OutOfMemoryError("CUDA out of memory")
                    done += part
                    hand = run.in_hand
                    weight += hand.weight if hand is not None else size / 8.0
                    last.append(hand is None or hand.is_last)
                    run.steps_ended += last[-1]
            assert done == numbers and weight == pytest.approx(size / 8.0)
            assert last == [False] * (len(last) - 1) + [True]
            assert run.in_hand is None and run.forgotten == 0


def test_another_loader_s_loop_inside_leaves_the_micro_batch_in_hand_alone() -> None:
    """A validation between two micro-batches of the training."""
    run = Run()
    run.in_hand = training = object()
    assert list(_deliver(run, Repeats(), [1, 2, 3])) == [[1, 2, 3]]
    assert run.in_hand is training and run.forgotten == 0


@pytest.mark.parametrize("whole", [True, False])
def test_parts_of_a_batch_inside_another_loop_leave_its_micro_batch_in_hand(whole: bool) -> None:
    run, repeats = Run(), Repeats()
    run.memory.lower(1, 3)
    run.in_hand = training = MicrobatchInHand(5, 8.0, lambda: True, 1.0, loader=0)
    parts = repeats.deliver(run, 1, 3, [1, 2, 3], lambda start, stop: list(range(start, stop)))
    assert next(parts) == [0] and run.in_hand is not training
    assert not whole or list(parts) == [[1, 2]]
    parts.close()
    assert run.in_hand is training and run.forgotten == 0 and run.used == [1]


def test_parts_may_come_before_the_first_training() -> None:
    """What makes a weight of 1 is unknown then."""
    run, repeats = Run(), Repeats()
    run.memory.lower(0, 3)
    run.reference_samples = 0.0
    assert list(_deliver(run, repeats, [1, 2, 3])) == [[1], [2, 3]]


def test_the_limit_is_sent_and_later_batches_are_cut_to_it() -> None:
    run, repeats = Run(), Repeats()
    for part in _deliver(run, repeats, list(range(20))):
        with catch_out_of_memory(_loader(repeats)):
            if len(part) > 10:
                raise MemoryError
            run.steps_ended += run.in_hand.is_last
    assert [(message.loader, message.most) for message in run.sent] == [(0, 17)]
    assert [len(part) for part in _deliver(run, repeats, list(range(36)))] == [12, 12, 12]
    assert run.forgotten == 1, "no step was made of these"


@pytest.mark.parametrize(
    ("run", "size", "reason"),
    [
        (Run(world_size=1), 8, "the job has one rank"),
        (Run(), 1, "one sample"),
        (Run(whole_only="gradients are sparse"), 8, "gradients are sparse"),
        (Run(), 8, "a step was begun"),
        (Run(equal_batches="a collective is part of the pass"), 8, "a collective is part of the pass"),
    ],
)
def test_what_cannot_be_repeated_is_raised_with_the_reason(
    run: Run, size: int, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    repeats = Repeats()
    with pytest.raises(torch.OutOfMemoryError):
        for _ in _deliver(run, repeats, list(range(size))):
            with catch_out_of_memory(_loader(repeats)):
                run.steps_ended += "begun" in reason
                raise torch.OutOfMemoryError("CUDA out of memory")
    assert reason in caplog.text
    assert not run.sent


@pytest.mark.parametrize("fails_at", [0, 2])
def test_where_the_loop_fetches_a_batch_ahead_none_is_repeated_instead_of_another(
    fails_at: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The batch delivered last is not the one the loop works on; before the first gradient two were delivered."""
    run, repeats, trained = Run(), Repeats(), []

    def fetched_ahead() -> Iterator[list[int]]:
        run.feeding.begin(0)
        batches = [list(range(8 * i, 8 * i + 8)) for i in range(5)]
        loop = (part for batch in batches for part in _noted(run, repeats, batch))
        present = next(loop)
        for following in loop:
            yield present
            present = following

    with pytest.raises(torch.OutOfMemoryError):
        for batch in fetched_ahead():
            with catch_out_of_memory(_loader(repeats)):
                if batch[0] == 8 * fails_at:
                    raise torch.OutOfMemoryError("CUDA out of memory")
                run.feeding.weight(1)
                run.steps_ended += 1
                trained.append(batch[0])
    assert "takes a batch before the gradient of the one before it" in caplog.text
    assert trained == [8 * i for i in range(fails_at)] and not run.sent and run.memory.failed(0) == 0


def test_a_loop_that_fetches_ahead_gets_whole_batches_whatever_has_failed_in_an_earlier_loop() -> None:
    """The part in hand would be another than the one the loop works on."""
    run, repeats = Run(), Repeats()
    run.memory.lower(0, 6)
    assert [len(part) for part in _noted(run, repeats, list(range(8)))] == [4, 4]
    run.feeding.begin(0)
    for _ in range(2):
        run.feeding.note(0, 1.0)
    run.feeding.weight(1)
    assert run.feeding.fetches_ahead(0)
    assert [len(part) for part in _noted(run, repeats, list(range(8)))] == [8]


@pytest.mark.parametrize("optimizers", [1, 2])
def test_where_an_optimizer_makes_several_steps_with_each_batch_none_is_repeated(
    optimizers: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Its parts would make one step. Two optimizers may make one step each."""
    run, repeats, sizes = Run(), Repeats(), []
    run.drivers = dict.fromkeys(range(optimizers), run.drivers[0])
    with contextlib.nullcontext() if optimizers == 2 else pytest.raises(MemoryError):
        for i in range(3):
            for part in _deliver(run, repeats, list(range(8))):
                with catch_out_of_memory(_loader(repeats)):
                    if i == 2 and len(part) == 8:
                        raise MemoryError
                    sizes.append(len(part))
                    run.steps_ended += 2 * (run.in_hand is None or run.in_hand.is_last)
    assert sizes == ([8, 8] if optimizers == 1 else [8, 8, 4, 4])
    assert ("several steps were made with the batch before it" in caplog.text) == (optimizers == 1)


@pytest.mark.parametrize("meets", [False, True])
def test_gradients_that_need_equally_many_passes_are_not_accumulated(
    meets: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Layers that were not used yet have pinned nothing; optimizers on Horovod's own path are none of the runtime's."""
    run = Run(net=SyncBatchNorm(4)) if meets else Run()
    repeats = Repeats() if meets else Repeats(lambda: "reduced by Horovod itself")
    if not meets:
        run.drivers.clear()
    with pytest.raises(torch.OutOfMemoryError):
        for _ in _deliver(run, repeats, [1, 2]):
            with catch_out_of_memory(_loader(repeats)):
                raise torch.OutOfMemoryError("CUDA out of memory")
    expected = "layers that reduce over all ranks within a pass" if meets else "reduced by Horovod itself"
    assert expected in caplog.text and not run.sent


def test_errors_that_are_none_of_memory_are_raised_as_ever(caplog: pytest.LogCaptureFixture) -> None:
    for error in (ValueError("size"), RuntimeError("shapes differ"), KeyboardInterrupt()):
        with pytest.raises(type(error)), catch_out_of_memory(_loader(Repeats())):
            raise error
    assert not caplog.records


def test_what_the_allocator_of_the_cpu_raises_is_an_error_of_memory(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RuntimeError), catch_out_of_memory(_loader(Repeats())):
        torch.empty(1 << 55)
    assert "map-style" in caplog.text


class _Fails(torch.autograd.Function):
    saved: list[weakref.ref[torch.Tensor]]

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        kept = values * 2.0
        ctx.kept = kept
        _Fails.saved.append(weakref.ref(kept))
        return kept.unsqueeze(1) * 1.0

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")


@dataclasses.dataclass
class _Output:
    loss: torch.Tensor
    logits: torch.Tensor


def _model(weight: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = _Fails.apply(weight)  # type: ignore[no-untyped-call]
    return found


@pytest.mark.parametrize("kind", ["loss", "view", "views of views", "tuple", "mapping", "dataclass"])
def test_the_graph_of_the_failed_pass_is_freed_although_the_loop_has_its_results(kind: str) -> None:
    """Until the loop assigns them again, and that is behind the forward pass of the part."""
    _Fails.saved = []
    run, repeats = Run(), Repeats()
    weight = torch.ones(3, requires_grad=True)
    seen, kept = [], {}
    for part in _deliver(run, repeats, list(range(8))):
        seen.append([ref() is None for ref in _Fails.saved])
        with catch_out_of_memory(_loader(repeats)):
            if len(part) == 8:
                logits: Any = _model(weight)
                if kind != "loss":
                    logits = logits.squeeze(1)
                if kind == "views of views":
                    logits = logits[:2][:1]
                loss = logits.sum()
                if kind == "tuple":
                    logits = (loss, [logits])
                elif kind == "mapping":
                    logits = collections.OrderedDict(loss=loss, logits=logits)
                elif kind == "dataclass":
                    logits = _Output(loss, logits)
                kept = {"logits": logits}
                loss.backward()
    assert seen[1] == [True] and float(loss) and kept["logits"] is logits


def test_the_graph_is_freed_although_another_error_came_of_the_first() -> None:
    """Gone when the part begins: the error itself is of this and earlier calls, which refer to each other."""
    _Fails.saved = []
    run, repeats = Run(), Repeats()
    weight = torch.ones(3, requires_grad=True)

    def compute() -> None:
        loss = _model(weight).sum()
        try:
            loss.backward()
        except torch.OutOfMemoryError as error:
            first = error  # noqa: F841 - Refers to this call, which refers to it.
            raise RuntimeError("the compiled pass failed: CUDA out of memory") from error

    seen = []
    gc.disable()
    try:
        for part in _deliver(run, repeats, list(range(8))):
            seen.append([ref() is None for ref in _Fails.saved])
            with catch_out_of_memory(_loader(repeats)):
                if len(part) == 8:
                    compute()
    finally:
        gc.enable()
    assert seen[1] == [True]


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ],
)
def test_memory_that_a_library_did_not_get_is_an_error_of_memory(text: str) -> None:
    run, repeats = Run(), Repeats()
    parts = []
    for part in _deliver(run, repeats, list(range(8))):
        with catch_out_of_memory(_loader(repeats)):
            parts.append(len(part))
            if len(part) == 8:
                raise torch.AcceleratorError(text)
    assert parts == [8, 4, 4]


def test_a_part_of_a_batch_is_what_collating_its_samples_gives() -> None:
    samples = [{"a": (torch.full((2,), float(i)), i), "b": Point(float(i), f"n{i}")} for i in range(6)]
    whole = default_collate(samples)
    expected, found = default_collate(samples[1:4]), cut_batch(whole, 1, 4, 6)
    assert torch.equal(found["a"][0], expected["a"][0]) and torch.equal(found["a"][1], expected["a"][1])
    assert torch.equal(found["b"].x, expected["b"].x) and found["b"].name == expected["b"].name
    with pytest.raises(ValueError, match="one entry for each of 6 samples"):
        cut_batch([torch.ones(3)], 1, 4, 6)


def test_limits_are_the_least_of_all() -> None:
    cpu = torch.device("cpu")
    limits = MemoryLimits(0)
    assert limits.most(0, 0, 10, cpu) == limits.most(0, 0, 10, None) == limits.failed(0) == 0
    assert (limits.lower(0, 100), limits.lower(0, 40), limits.lower(0, 60), limits.lower(0, 1)) == (85, 34, 34, 1)
    assert limits.most(0, 0, 10, cpu) == 1 and limits.most(1, 0, 10, cpu) == 0
    assert MemoryLimits(12).most(0, 0, 10, cpu) == 12


def test_a_limit_holds_for_the_next_loader_with_equal_batches() -> None:
    limits, cpu = MemoryLimits(0), torch.device("cpu")
    limits.begin(0, 100, -1)
    limits.lower(0, 100)
    for loader, batch, before in ((1, 100, 0), (2, 100, 1), (3, 50, 2)):
        limits.begin(loader, batch, before)
    assert [limits.most(loader, loader, 10, cpu) for loader in range(4)] == [85, 85, 85, 0]
    assert limits.failed(1) == 0, "its loop may not be one whose batches can be delivered in parts"


def test_a_batch_for_which_the_allocator_had_to_retry_is_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = {"num_alloc_retries": 0, "num_ooms": 0}
    free = [80, 80, 90, 20]
    monkeypatch.setattr("star_hvd.runtime.memory_limits.samples_in_memory", lambda *_: free.pop(0))
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    limits, device = MemoryLimits(0), torch.device("cuda")
    assert limits.most(0, 0, 32, device) == 80
    stats["num_alloc_retries"] += 1
    assert limits.most(0, 0, 40, device) == 40
    assert limits.most(0, 0, 38, device) == 40, "no retry since"
    assert limits.most(0, 0, 38, device) == 20


class Device:
    """A GPU with 80 bytes within reach, and the peak of memory use on it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.peak_bytes = 0
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: self.peak_bytes)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 80)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 80))
        monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {})

    def most(self, limits: MemoryLimits, loader: int, largest: int, peak_bytes: int) -> int:
        self.peak_bytes = peak_bytes
        return limits.most(loader, loader, largest, torch.device("cuda"))


def test_the_peak_of_a_process_belongs_to_the_largest_batch_of_equal_loaders(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader per epoch: the share has become small, and the peak is that of a whole batch."""
    gpu, limits = Device(monkeypatch), MemoryLimits(0)
    limits.begin(0, 64, -1)
    whole = gpu.most(limits, 0, 64, 40)
    assert whole > 64
    for loader in (1, 2, 3):
        limits.begin(loader, 64, loader - 1)
        assert gpu.most(limits, loader, 20, 40) == whole
    limits.begin(4, 16, 3)
    assert gpu.most(limits, 4, 16, 40) == whole // 4, "of other batches nothing is known"


def test_a_peak_that_the_program_reset_is_not_that_of_the_largest_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, limits = Device(monkeypatch), MemoryLimits(0)
    limits.begin(0, 64, -1)
    whole = gpu.most(limits, 0, 64, 40)
    assert gpu.most(limits, 0, 64, 13) == whole, "the peak is of a share of 20 now"
    assert gpu.most(limits, 0, 80, 13) == whole, "a batch of 80 came before the peak was reset"
    assert gpu.most(limits, 0, 80, 60) == 90 == int(80 * 0.85 * 80 / 60)


def test_shares_that_cannot_be_within_the_user_s_limit_are_refused_at_the_start() -> None:
    asked = AskedPlans(4, 12)
    asked.add(0, parse_mode("sync(balanced)", 4))
    asked.check_shares(12)
    with pytest.raises(ValueError, match="max_batch is 12, and 4 ranks with batch_size 13 make 52 samples"):
        asked.check_shares(13)
    asked.forget(0)
    asked.check_shares(13)


def test_the_error_is_known_by_its_name_in_all_supported_versions_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.OutOfMemoryError` is newer than the oldest of them."""
    monkeypatch.delattr(torch, "OutOfMemoryError", raising=False)
    run, repeats, done, failed = Run(), Repeats(), list[int](), False
    for part in _deliver(run, repeats, [1, 2]):
        with catch_out_of_memory(_loader(repeats)):
            if not failed:
                failed = True
                raise torch.cuda.OutOfMemoryError("CUDA out of memory")
            done += part
            run.steps_ended += run.in_hand is None or run.in_hand.is_last
    assert done == [1, 2]
