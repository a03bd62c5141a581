"""Every rank of jobs with `Compression.auto`: `python -m tests.multiproc.compression_job SCENARIO`."""

from __future__ import annotations

import copy
import dataclasses
import logging
import sys
import time
from typing import Any

import torch

import star_hvd as hvd
from benchmarks.lab.networks import make_network
from benchmarks.lab.tasks import Task, load_task
from scheduler.transmission.off_switch import OffSwitch
from scheduler.transmission.push_form import PushChoice
from scheduler.transmission.wire import FORMS, LOW_RANK, NONE, WireChoice
from star_hvd.compression.lossy_wire import STATE_KEY, LossyWire
from star_hvd.compression.pushes import PushCodec
from star_hvd.compression.server_pushes import ServerPushes
from star_hvd.runtime import runtime
from tests.multiproc.modes import CONFIG, publish, within
from tests.multiproc.scenarios import digest
from tests.support.inside import driver_of, inside
from tests.support.launch import write_result

TOUR = ("partial(3)", "sync", "subgroup(0,1,2)", "sync", "local(2)", "sync")
STEPS = 14  # In each mode.
FORMS_TRAINED = {FORMS[NONE]: NONE, FORMS[LOW_RANK]: LOW_RANK}
SEEDS, EPOCHS, BATCH, RATE = 3, 15, 32, 0.05
LATE_POINTS = 2.0  # When a child's gradients come is chance, and one seed differs from itself by half a point.


class Always(WireChoice):
    """Asks for one form, whatever it costs: what is tested must not depend on the machine's speed."""

    form = NONE

    def observe(self, form: int, step_s: float, exposed_s: float) -> bool:
        return False

    def restart(self) -> None:
        self.wanted = self.form


def lossy_optimizer(net: torch.nn.Module, form: int, mode: str = "sync", **options: Any) -> tuple[Any, LossyWire]:
    own = torch.optim.SGD(net.parameters(), lr=options.pop("lr", 0.02), momentum=0.9)
    config = options.pop("config", CONFIG)
    wrapped = hvd.DistributedOptimizer(
        own, net.named_parameters(), compression=hvd.Compression.auto, mode=mode, config=config, **options
    )
    wire = inside(wrapped).core.wire
    assert isinstance(wire, LossyWire)
    engine = driver_of(wrapped).engine
    wire.choice = Always()
    wire.choice.form = form  # type: ignore[attr-defined]
    with engine.lock:
        wire.restart()
    return wrapped, wire


def wide() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 24))


def step(net: torch.nn.Module, optimizer: Any, number: int) -> float:
    generator = torch.Generator().manual_seed(1000 * int(hvd.rank()) + number)
    inputs = torch.randn(8, 32, generator=generator)
    optimizer.zero_grad()
    loss = (net(inputs) - inputs[:, :24].sin()).square().mean()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def parts(optimizer: Any) -> list[float]:
    """What rank 0's decisions know of the sizes of reductions and pushes, in parts of a whole gradient."""
    run = runtime.current()
    if run is None or run.coordinator is None:
        return []
    with run.coordinator.job_state() as job:
        known = job.optimizers[driver_of(optimizer).number].window()
    return [known.reduced_part, known.pushed_part]


def tour() -> dict[str, Any]:
    """Through modes and back, compressed wherever gradients are reduced with those of all ranks or of a subgroup."""
    net = wide()
    optimizer, wire = lossy_optimizer(net, LOW_RANK)
    number, seen, losses = 0, {}, []
    for mode in TOUR:
        began_s = time.monotonic()
        publish(optimizer, mode)
        while optimizer.mode != mode and within(began_s):
            step(net, optimizer, number)
            publish(optimizer, mode)
            number += 1
        forms = set()
        for _ in range(STEPS):
            losses.append(step(net, optimizer, number))
            forms.add(FORMS[wire.form])
            number += 1
        seen[f"{len(seen)} {mode}"] = sorted(forms)
    state, known = optimizer.state_dict(), parts(optimizer)
    optimizer.close()
    left = state[STATE_KEY]["residuals"]
    return {
        "digest": digest(net),
        "forms": seen,
        "parts": known,
        "first": losses[0],
        "last": sum(losses[-5:]) / 5,
        "left": float(sum(value.norm() for value in left.values())),
        "explain": wire.explain(),
    }


def resumed() -> dict[str, Any]:
    """What is left to send is in the state: with it a second optimizer goes on exactly as the first would have."""
    net = wide()
    optimizer, _ = lossy_optimizer(net, LOW_RANK)
    for number in range(9):
        step(net, optimizer, number)
    state, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(net.state_dict())
    left = state[STATE_KEY]["residuals"]
    optimizer.load_state_dict(state)
    again = optimizer.state_dict()[STATE_KEY]["residuals"]
    same = all(torch.equal(again[i], value) for i, value in left.items())
    digests = []
    for loaded in (state, {key: value for key, value in state.items() if key != STATE_KEY}):
        twin = wide()
        twin.load_state_dict(weights)
        other, _ = lossy_optimizer(twin, LOW_RANK)
        other.load_state_dict(copy.deepcopy(loaded))
        for number in range(9, 12):
            step(twin, other, number)
        digests.append(digest(twin))
        other.close()
    optimizer.close()
    return {"same": same, "digests": digests, "keys": sorted(state), "exact": _exact()}


def _exact() -> dict[str, Any]:
    """With `accuracy="exact"` the loss that `Compression.auto` allows is not made use of."""
    heard: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    logging.getLogger("star_hvd").addHandler(listener := Listener())
    digests = []
    for compression in (hvd.Compression.auto, hvd.Compression.none):
        net = wide()
        own = torch.optim.SGD(net.parameters(), lr=0.02)
        optimizer = hvd.DistributedOptimizer(
            own, net.named_parameters(), compression=compression, mode="sync", config=CONFIG, accuracy="exact"
        )
        for number in range(3):
            step(net, optimizer, number)
        lossy = inside(optimizer).core.wire is not None
        digests.append(digest(net))
        optimizer.close()
        if lossy:
            break
    logging.getLogger("star_hvd").removeHandler(listener)
    return {"lossy": lossy, "digests": digests, "warnings": [text for text in heard if "accuracy is 'exact'" in text]}


def _train(net: torch.nn.Module, optimizer: Any, inputs: torch.Tensor, labels: torch.Tensor, seed: int) -> None:
    """This rank's samples, `EPOCHS` times."""
    order = torch.Generator().manual_seed(seed)
    for epoch in range(EPOCHS):
        optimizer.param_groups[0]["lr"] = RATE * (1.0 - epoch / EPOCHS)
        for rows in torch.randperm(len(inputs), generator=order).split(BATCH)[:-1]:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(net(inputs[rows]), labels[rows]).backward()
            optimizer.step()


def _accuracy(net: torch.nn.Module, task: Task) -> float:
    """Percent of the test samples."""
    with torch.no_grad():
        return 100.0 * float((net(task.test_x).argmax(1) == task.test_y).float().mean())


def accuracy() -> dict[str, Any]:
    """Final accuracy on the digits, over seeds, for each form."""
    torch.set_num_threads(1)
    task = load_task("digits", 1280)
    inputs, labels = task.train.tensors  # type: ignore[attr-defined]
    found: dict[str, list[float]] = {name: [] for name in FORMS_TRAINED}
    mine = torch.arange(int(hvd.rank()), len(inputs), int(hvd.size()))
    digests = []
    for seed in range(SEEDS):
        for name, form in FORMS_TRAINED.items():
            torch.manual_seed(seed)
            net = make_network("digits", 64, "mlp")
            optimizer, _ = lossy_optimizer(net, form, lr=RATE)
            _train(net, optimizer, inputs[mine], labels[mine], seed)
            found[name].append(_accuracy(net, task))
            digests.append(digest(net))
            optimizer.close()
    return {"accuracy": found, "digests": digests}


class Small(PushChoice):
    """Wants one form of pushes, whatever it costs."""

    def observe(self, small: bool, time_s: float) -> bool:
        SENT.append(small)
        return False


SENT: list[bool] = []


def pushes() -> dict[str, Any]:
    """Accuracy on the digits in `subgroup` with a child that sends whole gradients, and int8; then its way back."""
    torch.set_num_threads(1)
    task = load_task("digits", 1280)
    inputs, labels = task.train.tensors  # type: ignore[attr-defined]
    mine = torch.arange(int(hvd.rank()), len(inputs), int(hvd.size()))
    found: dict[str, list[float]] = {"whole": [], "int8": []}
    for seed in range(2):  # Hundreds of steps of waits for each other, each of which a busy machine makes longer.
        if hvd.broadcast_object(seed > 0 and _lost_points(found) <= LATE_POINTS, 0, name="enough"):
            break  # Another one only where the first may have had bad luck.
        for name, values in found.items():
            torch.manual_seed(seed)
            net = make_network("digits", 64, "mlp")
            optimizer, wire = lossy_optimizer(net, NONE, lr=RATE)
            choice = Small(small=name == "int8")
            wire.packer = lambda wire=wire, choice=choice: PushCodec(wire, 0, choice)  # type: ignore[method-assign]
            _into(optimizer, net, inputs[mine], labels[mine], "subgroup(0,1)")
            _train(net, optimizer, inputs[mine], labels[mine], seed)
            hvd.barrier()  # Before a member publishes the next mode.
            left = STATE_KEY in optimizer.state_dict()
            hvd.barrier()
            _into(optimizer, net, inputs[mine], labels[mine], "sync")
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(net(inputs[mine]), labels[mine]).backward()
            optimizer.step()
            hvd.barrier()
            values.append(_accuracy(net, task))
            after = STATE_KEY in optimizer.state_dict()
            optimizer.close()
    return {"accuracy": found, "sent": [SENT.count(False), SENT.count(True)], "left": [left, after],
            "digest": digest(net)}  # fmt: skip


def _lost_points(found: dict[str, list[float]]) -> float:
    """Accuracy that int8 costs, in the mean over the seeds."""
    return sum(found["whole"]) / len(found["whole"]) - sum(found["int8"]) / len(found["int8"])


class Fixed(OffSwitch):
    """Takes one form of pushes to servers, whatever it costs."""

    def note(self, step_s: float) -> bool:
        SENT.append(self.on)
        return False


def servers() -> dict[str, Any]:
    """Accuracy on the digits at servers that get whole gradients, and int8; then a step of `sync`."""
    torch.set_num_threads(1)
    task = load_task("digits", 1280)
    inputs, labels = task.train.tensors  # type: ignore[attr-defined]
    mine = torch.arange(int(hvd.rank()), len(inputs), int(hvd.size()))
    found: dict[str, list[float]] = {"whole": [], "int8": []}
    left = []
    for seed in range(2):  # Thousands of waits for another process, each of which a busy machine makes longer.
        config = dataclasses.replace(CONFIG, background=seed > 0)
        for name, values in found.items():
            torch.manual_seed(seed)
            net = make_network("digits", 64, "mlp")
            optimizer, wire = lossy_optimizer(net, NONE, lr=RATE, config=config)
            switch = Fixed()
            switch.on = name == "int8"
            wire.server_pushes = lambda wire=wire, switch=switch: ServerPushes(wire, 0, switch)  # type: ignore[method-assign]
            _into(optimizer, net, inputs[mine], labels[mine], f"ps({hvd.size()})")
            hvd.barrier()
            _train(net, optimizer, inputs[mine], labels[mine], seed)
            values.append(_accuracy(net, task))
            left = [STATE_KEY in optimizer.state_dict()]
            hvd.barrier()
            _into(optimizer, net, inputs[mine], labels[mine], "sync")
            for _ in range(3):  # What is left may come too late for the first one, of which buckets were sent already.
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(net(inputs[mine]), labels[mine]).backward()
                optimizer.step()
            left.append(STATE_KEY in optimizer.state_dict())
            optimizer.close()
    return {"accuracy": found, "sent": [SENT.count(False), SENT.count(True)], "left": left, "digest": digest(net)}


def _into(optimizer: Any, net: torch.nn.Module, inputs: torch.Tensor, labels: torch.Tensor, mode: str) -> None:
    """Small steps until a mode is in force."""
    rate, began_s = optimizer.param_groups[0]["lr"], time.monotonic()
    optimizer.param_groups[0]["lr"] = 0.001
    publish(optimizer, mode)
    while optimizer.mode != mode and within(began_s):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(inputs[:BATCH]), labels[:BATCH]).backward()
        optimizer.step()
        publish(optimizer, mode)
    optimizer.param_groups[0]["lr"] = rate


def chosen() -> dict[str, Any]:
    """Nothing is lost where the choice is made by measurement and reductions are as good as free."""
    net = wide()
    own = torch.optim.SGD(net.parameters(), lr=0.02)
    optimizer = hvd.DistributedOptimizer(own, net.named_parameters(), compression=hvd.Compression.auto, mode="sync")
    for number in range(60):
        step(net, optimizer, number)
    wire = inside(optimizer).core.wire
    found = {"explain": wire.explain(), "digest": digest(net)}
    optimizer.close()
    return found


def unequal() -> dict[str, Any]:
    """Ranks have different numbers of threads in the first optimizer, equal ones in the second."""
    found, lossiest = [], []
    for threads in (1 + hvd.rank(), 1):
        torch.set_num_threads(threads)
        net = wide()
        own = torch.optim.SGD(net.parameters(), lr=0.02)
        optimizer = hvd.DistributedOptimizer(own, net.named_parameters(), compression=hvd.Compression.auto, mode="sync")
        for number in range(5):
            step(net, optimizer, number)
        wire = inside(optimizer).core.wire
        assert wire is not None
        found.append(wire.explain())
        lossiest.append(wire.choice.lossiest)
        optimizer.close()
    return {"explain": found, "lossiest": lossiest}


def main() -> None:
    hvd.init()
    write_result(globals()[sys.argv[1]]())
    hvd.shutdown()


if __name__ == "__main__":
    main()
