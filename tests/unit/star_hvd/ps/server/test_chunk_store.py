"""A chunk's optimizer against torch's own on whole tensors, its record, and the mirror that keeps it."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch

from scheduler.plan.plan import Plan
from scheduler.rules.server_rule import Push, ServerRule, Update
from star_hvd.engine.buckets import pack
from star_hvd.engine.hyperparameters import HyperRow
from star_hvd.errors import ChannelError
from star_hvd.ps.common.layout import Layout
from star_hvd.ps.common.mirror import Mirror, new_memory
from star_hvd.ps.common.optimizer_spec import OptimizerSpec, RowReader
from star_hvd.ps.common.record import Record
from star_hvd.ps.server.chunk_store import ChunkStore

OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (torch.optim.Adam, {"amsgrad": True, "weight_decay": 0.01}),
    (torch.optim.AdamW, {}),
    (torch.optim.RMSprop, {"centered": True, "momentum": 0.1}),
    (torch.optim.Adagrad, {"lr_decay": 0.1}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}),
    (torch.optim.Adamax, {}),
    (torch.optim.Adadelta, {}),
    (torch.optim.ASGD, {}),
    (torch.optim.Rprop, {}),
]
SHAPES = [(33, 41), (5,), (), (777,)]


class World:
    """Stores of all chunks of an optimizer, and the optimizer."""

    def __init__(self, base: Any, keywords: dict[str, Any], dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(0)
        self.params = [torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in SHAPES]
        groups = [{"params": self.params[:2]}, {"params": self.params[2:], "lr": 0.02}]
        self.optimizer = base(groups, lr=0.01, **keywords)
        self.buckets = pack(self.params, 6000)
        self.hyper = HyperRow(self.optimizer.param_groups)
        self.layout = Layout.build(self.buckets, self.optimizer.param_groups, base, 1, 700)
        self.spec = OptimizerSpec.of(base, self.optimizer.param_groups, self.hyper)
        self.ordered = [param for bucket in self.buckets for param in bucket.params]
        self.stores = self.new_stores()
        for store in self.stores:
            store.load(self.layout.cut_params(self.ordered, store.chunk), [{} for _ in store.chunk.pieces], 0)

    def new_stores(self) -> list[ChunkStore]:
        reader = RowReader(self.spec)
        return [ChunkStore(self.layout, chunk, self.spec, reader) for chunk in self.layout.chunks]

    def step(self, seed: int, row: list[float] | None = None) -> None:
        generator = torch.Generator().manual_seed(seed)
        for bucket in self.buckets:
            bucket.flat[:-1].copy_(torch.randn(bucket.numel, generator=generator))
            for position in range(len(bucket.params)):
                bucket.params[position].grad = bucket.views[position].clone()
        for store in self.stores:
            flat = self.buckets[store.chunk.bucket].flat[store.chunk.start : store.chunk.stop]
            store.apply([1.0], [flat.clone()], row)
        self.optimizer.step()

    def check(self, stores: list[ChunkStore]) -> None:
        params = self.layout.join_params({store.chunk.index: store.params for store in stores})
        states = self.layout.join_state({store.chunk.index: store.states() for store in stores})
        for mine, state, param in zip(params, states, self.ordered, strict=True):
            assert torch.equal(mine, param.detach())
            theirs = self.optimizer.state[param]
            assert state.keys() == theirs.keys()
            for key, value in theirs.items():
                same = torch.equal(state[key], value) if isinstance(value, torch.Tensor) else state[key] == value
                assert same, key


@pytest.mark.parametrize(("base", "keywords"), OPTIMIZERS, ids=lambda v: getattr(v, "__name__", ""))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_cut_model_steps_as_the_whole_one_bit_for_bit(base: Any, keywords: dict[str, Any], dtype: Any) -> None:
    world = World(base, keywords, dtype)
    assert any(len(piece.shape) != len(SHAPES[0]) for chunk in world.layout.chunks for piece in chunk.pieces)
    for seed in range(4):
        world.step(seed)
    world.check(world.stores)


def test_a_row_changes_the_hyperparameters_from_that_step_on() -> None:
    world = World(torch.optim.SGD, {"momentum": 0.5})
    world.step(0)
    for group in world.optimizer.param_groups:
        group["lr"] *= 0.1
        group["momentum"] = 0.7
    world.step(1, world.hyper.read(world.optimizer.param_groups))
    world.step(2)
    world.check(world.stores)


def test_the_sum_is_made_in_order_and_in_float32_at_least() -> None:
    world = World(torch.optim.SGD, {}, torch.bfloat16)
    store = world.stores[0]
    store.use_row([0.0 if n not in (0.01, 0.02) else 1.0 for n in world.hyper.read(world.optimizer.param_groups)])
    for group in store.optimizer.param_groups:
        group["lr"] = 1.0
    before = store.params.clone()
    big = torch.full((store.chunk.numel,), 256.0, dtype=torch.bfloat16)
    one = torch.ones(store.chunk.numel, dtype=torch.bfloat16)
    # 256 + 1 is 256 in bfloat16: only a wider sum sees the difference.
    store.apply([1.0, 1.0, -1.0], [big.clone(), one, big])
    assert torch.equal(store.params, before - 1.0)


def test_a_record_brings_everything_back_and_damage_is_noticed() -> None:
    world = World(torch.optim.Adam, {})
    row = world.hyper.read(world.optimizer.param_groups)
    world.step(0, row)
    world.step(1)
    again = world.new_stores()
    for store, copy in zip(world.stores, again, strict=True):
        store.applied, store.seq = {3: 9}, 17
        record = store.record()
        data = torch.empty(record.nbytes, dtype=torch.uint8)
        record.write(data)
        copy.restore(data)
        assert (copy.version, copy.seq, copy.applied, copy.row) == (2, 17, {3: 9}, row)
        with pytest.raises(ChannelError, match="cannot be read"):
            copy.restore(data[: len(data) // 2])
    world.stores = again
    world.step(2)
    world.check(again)


def test_an_update_without_any_part_only_counts() -> None:
    world = World(torch.optim.SGD, {"momentum": 0.9})
    before = world.stores[0].params.clone()
    world.stores[0].apply([], [])
    assert world.stores[0].version == 1 and torch.equal(world.stores[0].params, before)


def train(plan: Plan, passes: int, base: Any, size: float = 1.0, **keywords: Any) -> ChunkStore:
    """Ranks in turn push the same gradient, as `passes` passes over all of them."""
    world = World(base, keywords)
    store, rule = world.stores[0], ServerRule(plan, version=0)
    gradient = size * torch.linspace(0.1, 1.0, store.chunk.numel)
    fetched = [0] * plan.world_size
    for step in range(passes):
        for rank in range(plan.world_size):
            for event in rule.push(Push(rank=rank, step=step, version=fetched[rank], weight=1.0)):
                if isinstance(event, Update):
                    factors = [part.factor for part in event.parts]
                    store.apply(factors, [gradient.clone() for _ in factors], None, event.lr_factor)
                    for part in event.parts:
                        fetched[part.rank] = rule.version
    return store


ASYNC = (Plan.ps(4, 1), Plan.ps(4, 2), Plan.ps(4, 1, damping="inverse", lr_rule="none"))


@pytest.mark.parametrize("plan", ASYNC, ids=["ps(1)", "ps(2)", "dynsgd"])
@pytest.mark.parametrize(("size", "decay"), [(1.0, 0.0), (0.0, 2.0)], ids=["gradient", "decay"])
@pytest.mark.parametrize(("base", "keywords"), [(torch.optim.SGD, {}), (torch.optim.AdamW, {"betas": (0.9, 0.95)})])
def test_a_pass_over_all_ranks_moves_as_far_as_a_synchronous_step(
    base: Any, keywords: dict[str, Any], size: float, decay: float, plan: Plan
) -> None:
    moved = []
    for each in (Plan.ps(4, 4), plan):
        # The usual damping is found in the first passes, which Adam's second moments must have forgotten.
        middle, end = (train(each, n, base, size, weight_decay=decay, **keywords).params for n in (50, 70))
        moved.append(end - middle if decay == 0.0 else end / middle)
    assert torch.allclose(moved[0], moved[1], rtol=0.02)


@pytest.mark.parametrize("plan", ASYNC, ids=["ps(1)", "ps(2)", "dynsgd"])
def test_the_optimizers_state_has_the_size_that_synchronous_training_goes_on_with(plan: Plan) -> None:
    states = [train(each, 400, torch.optim.Adam, betas=(0.9, 0.95)).states()[0] for each in (Plan.ps(4, 4), plan)]
    for key in ("exp_avg", "exp_avg_sq"):
        assert torch.allclose(states[0][key], states[1][key], rtol=0.02), key


@pytest.mark.parametrize("lr", [0.5, 1, torch.tensor(0.5)])
def test_a_learning_rate_is_scaled_for_one_step_alone(lr: Any) -> None:
    store = World(torch.optim.SGD, {}).stores[0]
    before, one = store.params.clone(), torch.ones(store.chunk.numel)
    for group in store.optimizer.param_groups:
        group["lr"] = lr
    store.apply([1.0], [one.clone()], None, 0.25)
    assert torch.allclose(before - store.params, 0.25 * lr * one)
    assert all(group["lr"] is lr for group in store.optimizer.param_groups)


@pytest.mark.parametrize("base", [torch.optim.Rprop, torch.optim.ASGD])
def test_no_scaled_learning_rate_stays_in_the_optimizers_state(base: Any) -> None:
    """Rprop starts its step sizes from the learning rate, ASGD keeps that of its next step as `eta`."""
    states = []
    for lr_factor in (1.0, 0.125):
        store = World(base, {}).stores[0]
        for _ in range(2):
            store.apply([1.0], [torch.ones(store.chunk.numel)], None, lr_factor)
        states.append(store.states()[0])
    for key in {"step_size", "eta"} & states[0].keys():
        assert torch.equal(states[0][key], states[1][key]), key


def test_asgd_moves_by_the_scaled_gradient() -> None:
    store = World(torch.optim.ASGD, {"lambd": 0.0}).stores[0]
    before, lrs = store.params.clone(), {group["lr"] for group in store.optimizer.param_groups}
    store.apply([1.0], [torch.ones(store.chunk.numel)], None, 0.25)
    assert {round(float(moved) / 0.25, 4) for moved in before - store.params} == lrs


def test_without_a_learning_rate_the_gradient_is_scaled() -> None:
    store = World(torch.optim.SGD, {}).stores[0]
    for group in store.optimizer.param_groups:
        group["lr"] = None
    seen: list[torch.Tensor] = []
    store.optimizer.step = lambda: seen.extend(  # type: ignore[assignment,method-assign]
        param.grad.clone() for group in store.optimizer.param_groups for param in group["params"]
    )
    store.apply([2.0], [torch.ones(store.chunk.numel)], None, 0.25)
    assert seen and all(torch.equal(grad, torch.full_like(grad, 0.5)) for grad in seen)


def blob(value: int, size: int) -> Record:
    return Record(b"", [torch.full((size,), value, dtype=torch.uint8)])


def test_the_mirror_keeps_the_last_whole_record() -> None:
    memory = new_memory()
    mirror = Mirror(os.dup(memory), 3)
    assert mirror.read(0) is None
    for value, size in ((1, 10), (2, 10), (3, 100_000), (4, 10)):
        mirror.write(1, blob(value, size))
        reader = Mirror(os.dup(memory), 3)  # Another process.
        found = reader.read(1)
        assert found is not None and found[16:].tolist()[:size] == [value] * size
        assert reader.read(0) is None and reader.read(2) is None
    torn = blob(5, 10)
    write = Record.write

    def killed(self: Record, target: torch.Tensor) -> None:
        write(self, target)
        raise KeyboardInterrupt

    try:
        Record.write = killed  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            mirror.write(1, torn)
    finally:
        Record.write = write  # type: ignore[method-assign]
    found = Mirror(os.dup(memory), 3).read(1)
    assert found is not None and found[16:26].tolist() == [4] * 10


def test_memory_that_is_being_sent_is_left_alone() -> None:
    mirror, size = Mirror(new_memory(), 1), 100_000  # ZeroMQ copies what is small.
    held, frames = [], []
    for value in range(2):
        lent = mirror.write(0, blob(value, size))
        assert lent is not None
        frames.append(lent.frame(0, size))
        assert lent.frame(0, size) is frames[-1]
        held.append(lent.data)
        lent.drop()
    for value in range(2, 9):
        assert mirror.write(0, blob(value, size)) is None, "else memory would grow with the versions on their way"
        found = mirror.read(0)
        assert found is not None and int(found[16]) == value
    assert [int(data[0]) for data in held] == [0, 1] and mirror.most_places == 4
    frames.clear()
    for _ in range(6000):
        if mirror.idle:
            break
        time.sleep(0.01)
    before = mirror.size_bytes
    for value in range(5):
        assert mirror.write(0, blob(value, size)) is not None
    assert mirror.size_bytes == before, "places that are free are used again"
