"""Every rank of a job whose optimizers are dropped without `close`, in the middle of a step, or fail on some ranks."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from horovod.torch import mpi_ops

import star_hvd as hvd
from star_hvd.errors import DeadlineError
from star_hvd.runtime import runtime
from tests.support.launch import write_result
from tests.support.plain import horovod

DEADLINE_S = 8.0  # Where it is to pass.
NEVER_S = 100.0  # Longer than a busy machine holds up a rank; a step that waits for it fails all the same.
CONFIG = hvd.Config(step_deadline_s=NEVER_S)
STEPS = 4
LEFT = 2  # Of a series, that may be about to end.


class Failing(torch.optim.SGD):
    """Raises in its second step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        if self.calls == 2:
            raise ArithmeticError("the user's optimizer failed")
        return super().step(closure)


def net(width: int = 16) -> torch.nn.Module:
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Tanh(), torch.nn.Linear(width, width))


def backward(model: torch.nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(100 * step + hvd.rank())
    width = next(model.parameters()).shape[1]
    model(torch.randn(4, width, generator=generator)).square().mean().backward()


def train(library: Any, model: torch.nn.Module, steps: int = STEPS, **options: Any) -> list[torch.Tensor]:
    """The parameters after some steps with an optimizer that is dropped on return."""
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = library.DistributedOptimizer(inner, named_parameters=model.named_parameters(), **options)
    for step in range(steps):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
    return [param.detach().clone() for param in model.parameters()]


def expected(steps: int = STEPS) -> list[torch.Tensor]:
    """What plain Horovod comes to; on a model of its own, whose hooks stay on it."""
    return train(horovod, net(), steps)


def same(found: list[torch.Tensor], plain: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))


def fails_in_step(mode: str) -> dict[str, Any]:
    """The user's optimizer class raises on all ranks, is caught, steps on, raises no more, and is dropped."""
    model = net()
    optimizer = hvd.DistributedOptimizer(
        Failing(model.parameters()), model.named_parameters(), mode=mode, config=CONFIG
    )
    caught = 0
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(model, step)
        try:
            optimizer.step()
        except ArithmeticError:
            caught += 1
    return {"caught": caught, "steps": optimizer.stats()["steps"]}


def fails_in_backward(mode: str, failing: tuple[int, ...]) -> dict[str, Any]:
    """A hook of the user's raises in the middle of backward, and the optimizer is dropped with half a step begun."""
    model = net()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        model.named_parameters(),
        mode=mode,
        config=hvd.Config(step_deadline_s=NEVER_S, bucket_bytes=1024),  # Several buckets.
    )

    def fail(grad: torch.Tensor) -> None:
        raise ArithmeticError("the user's hook failed")

    hook = model[0].weight.register_hook(fail) if hvd.rank() in failing else None
    outcome = "stepped"
    try:
        backward(model, 0)
        optimizer.step()
    except ArithmeticError:
        outcome = "caught"
    if hook is not None:
        hook.remove()
    return {"outcome": outcome}


def keeps_the_failed_one(mode: str) -> dict[str, Any]:
    """One rank leaves a step in its middle and keeps the optimizer: the others have a deadline, and go on after it."""
    model, config = net(), hvd.Config(step_deadline_s=DEADLINE_S)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), mode=mode, config=config
    )
    began_s, error = time.monotonic(), ""
    backward(model, 0)
    if hvd.rank() != 1:
        try:
            optimizer.step()  # In lockstep the whole of it was on its way when rank 1 left.
            optimizer.zero_grad()
            backward(model, 1)
            optimizer.step()
        except DeadlineError as caught:
            error = str(caught)
    waited_s = time.monotonic() - began_s
    found = train(hvd, net(), mode="sync")  # Rank 1 waits here meanwhile.
    return {"error": error, "waited_s": waited_s, "same": same(found, expected()), "kept": optimizer.mode}


def series(mode: str, count: int) -> dict[str, Any]:
    """Many optimizers one after another on the same parameters, each dropped; some in the middle of a step."""
    model, facts, ends = net(128), [], True
    run = runtime.current()
    for number in range(count):
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters(), mode=mode, config=CONFIG
        )
        run = runtime.current()
        for step in range(2):
            optimizer.zero_grad()
            backward(model, step)
            if step == 0 or number % 3:
                optimizer.step()
        del optimizer
        hooks = [len(param._post_accumulate_grad_hooks) for param in model.parameters()]
        assert run is not None
        ends = ends and all_gone(but=LEFT)  # Ranks tell each other of it, for which a busy machine takes its time.
        facts.append({"threads": threading.active_count(), "drivers": len(run.drivers), "hooks": max(hooks)})
    return {"facts": facts}


def until_in_force(optimizer: Any, model: torch.nn.Module, mode: str) -> list[torch.Tensor]:
    """Train until a mode is in force, and some steps in it, the last rank far behind. Return the momentum at first."""
    found = list[torch.Tensor]()
    while len(found) < STEPS:
        optimizer.zero_grad()
        backward(model, len(found))
        optimizer.step()
        if optimizer.mode == mode:
            time.sleep(0.2 * hvd.rank())
            found.append(momentum(optimizer))
    return found[:1]


def momentum(optimizer: Any) -> torch.Tensor:
    """The optimizer's state as it is on this rank."""
    return torch.cat([state["momentum_buffer"].flatten() for state in optimizer.state.values()])


def equal_everywhere(values: torch.Tensor) -> bool:
    """Whether all ranks have the same values. Collective, and Horovod's own: no rank catches up in it."""
    gathered = mpi_ops.allgather(values[None], name="test.equal")
    return all(torch.equal(gathered[0], row) for row in gathered)


def wrapped_again(mode: str) -> dict[str, Any]:
    """The program wraps again, as after unfreezing, and its learning-rate scheduler refers to the first one."""
    model = net()
    first = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters(), mode=mode, config=CONFIG
    )
    scheduler = torch.optim.lr_scheduler.StepLR(first, STEPS)
    optimizer, made, run = first, [], runtime.current()
    assert run is not None
    equal, former = [], until_in_force(first, model, mode) if mode != "sync" else []
    for step in range(2 * STEPS):
        if step == STEPS:
            optimizer = hvd.DistributedOptimizer(first, model.named_parameters(), mode=mode, config=CONFIG)
            values = torch.cat([param.detach().flatten() for param in model.parameters()])
            equal = [equal_everywhere(values), equal_everywhere(momentum(first))]
            outdated = any(torch.equal(each, momentum(first)) for each in former)
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
        scheduler.step()
        made.append(run.steps_made())
    gone = next(iter(run.drivers.values())).dropped or len(run.drivers) == 1
    optimizer.close()
    lr = first.param_groups[0]["lr"]
    return {"made": made, "lr": lr, "first_gone": gone, "equal": equal, "outdated": outdated}


def all_gone(limit_s: float = 60.0, but: int = 0) -> bool:
    """Whether every optimizer that was dropped, but so many, has ended on this rank."""
    run, end_s = runtime.current(), time.monotonic() + limit_s
    assert run is not None
    while sum(not driver.over for driver in list(run.drivers.values())) > but:
        if time.monotonic() > end_s:
            return False
        time.sleep(0.02)
    return True


def main(mode: str, scenario: str) -> None:
    torch.set_num_threads(1)
    hvd.init()
    scenarios: dict[str, Callable[[], dict[str, Any]]] = {
        "step": lambda: fails_in_step(mode),
        "backward": lambda: fails_in_backward(mode, tuple(range(hvd.size()))),
        "one-backward": lambda: fails_in_backward(mode, (1,)),
        "series": lambda: series(mode, 30),
        "again": lambda: wrapped_again(mode),
        "kept": lambda: keeps_the_failed_one(mode),
    }
    facts = scenarios[scenario]()
    if scenario != "kept":
        facts["gone"] = all_gone()
    if "same" not in facts:
        facts["same"] = same(train(hvd, net(), mode="sync"), expected())
    with contextlib.suppress(AttributeError):
        facts["handles"] = len(mpi_ops._handle_map)
    write_result(facts)
    began_s = time.monotonic()
    hvd.shutdown()
    write_result({**facts, "end_s": time.monotonic() - began_s})


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
