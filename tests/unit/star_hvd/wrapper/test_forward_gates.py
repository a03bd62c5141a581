"""Whatever uses a parameter behind a closed gate waits for its bucket, and for no other."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from star_hvd.errors import StarError
from star_hvd.wrapper.forward_gates import ForwardGates

UPDATE = 1.0


class Model(torch.nn.Module):
    """A frozen layer, a shared parameter, one used twice, one used by another module, and one used by none."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(6, 4)
        self.twice = torch.nn.Linear(4, 4)
        self.frozen = torch.nn.Linear(4, 4).requires_grad_(False)
        self.rnn = torch.nn.LSTM(4, 4)
        self.norm = torch.nn.LayerNorm(4)
        self.unused = torch.nn.Linear(4, 4)
        self.tied = torch.nn.Linear(4, 6, bias=False)
        self.tied.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.frozen(self.twice(self.twice(self.embed(x))))
        y, _ = self.rnn(y)
        return torch.nn.functional.linear(self.norm(y), self.embed.weight)


class Buckets:
    """One bucket per trained parameter; its update adds one, and is applied when it is waited for."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.params = [param for param in model.parameters() if param.requires_grad]
        self.waited: list[int] = []
        self.gates = ForwardGates(self.wait)

    def wait(self, index: int) -> None:
        self.waited.append(index)
        self.gates.open(index)
        with torch.no_grad():
            self.params[index].add_(UPDATE)

    def close(self) -> None:
        self.waited.clear()
        for index, param in enumerate(self.params):
            self.gates.close(index, [param])


@pytest.fixture
def pair() -> Iterator[tuple[Model, Buckets]]:
    torch.manual_seed(0)
    model = Model()
    buckets = Buckets(model)
    yield model, buckets
    buckets.gates.remove()


X = torch.tensor([[0, 1], [2, 5]])



def _loss(model: Model) -> Callable[[dict[str, torch.Tensor]], torch.Tensor]:
    return lambda params: torch.func.functional_call(model, params, (X,)).square().sum()


@torch.jit.script
def _doubled(x: torch.Tensor) -> torch.Tensor:
    return 2.0 * x


READS: dict[str, Callable[[Model], Any]] = {
    "forward": lambda m: m(X),
    "forward without gradients": lambda m: torch.no_grad()(m)(X),
    "functional use of another module's": lambda m: torch.nn.functional.linear(torch.ones(4), m.twice.weight),
    "functional call": lambda m: torch.func.functional_call(m, dict(m.named_parameters()), (X,)),
    "state dict": lambda m: m.state_dict(),
    "data": lambda m: [p.data for p in m.parameters()],
    "detach": lambda m: [p.detach() for p in m.parameters()],
    "vector": lambda m: torch.nn.utils.parameters_to_vector(m.parameters()),
    "foreach": lambda m: torch._foreach_norm(list(m.parameters())),
    "copy": copy.deepcopy,
    "pickle": pickle.dumps,
    "save": lambda m: torch.save(m, io.BytesIO()),
    "averaged model": lambda m: torch.optim.swa_utils.AveragedModel(m).update_parameters(m),
    "text": lambda m: [str(p) for p in m.parameters()],
    "number": lambda m: [float(p.sum()) for p in m.parameters()],
    "operator": lambda m: [1.0 * p + p for p in m.parameters()],
    "index": lambda m: [p[0] for p in m.parameters()],
    "gradient": lambda m: [p.grad for p in m.parameters()],
    "address": lambda m: [p.data_ptr() for p in m.parameters()],
    "transform of the parameters": lambda m: torch.func.grad(_loss(m))(dict(m.named_parameters()))["twice.weight"],
    "pulled back": lambda m: torch.func.vjp(_loss(m), dict(m.named_parameters()))[0],
    "pushed forward": lambda m: torch.func.jvp(torch.sum, (m.twice.weight,), (torch.ones(4, 4),))[0],
    "second derivative": lambda m: torch.func.hessian(lambda w: (w * w * w).sum())(m.twice.weight),
    "mapped": lambda m: torch.vmap(torch.sum)(m.twice.weight),
    "functionalized": lambda m: torch.func.functionalize(torch.sum)(m.twice.weight),
    "captured by a transform": lambda m: torch.func.grad(lambda x: (x @ m.twice.weight).sum())(torch.ones(4)),
    "scripted function": lambda m: _doubled(m.twice.weight),
    "operator by name": lambda m: torch.ops.aten.mul(m.twice.weight, 2.0),
    "write": lambda m: [torch.nn.init.zeros_(p) for p in m.parameters()],
}


ONE = {
    "functional use of another module's", "pushed forward", "second derivative", "mapped", "functionalized",
    "captured by a transform", "scripted function", "operator by name",
}  # fmt: skip


@pytest.mark.parametrize("name", READS)
def test_a_read_waits_and_sees_the_update(name: str, pair: tuple[Model, Buckets]) -> None:
    model, buckets = pair
    expected = copy.deepcopy(model)
    with torch.no_grad():
        for param in expected.parameters():
            if param.requires_grad:
                param.add_(UPDATE)
    buckets.close()
    held = buckets.params[0]
    assert isinstance(held, torch.nn.Parameter) and held.shape == (6, 4) and held.requires_grad and not buckets.waited
    found, wanted = READS[name](model), READS[name](expected)
    assert len(set(buckets.waited)) == len(buckets.waited)
    if name in ONE:
        assert len(buckets.waited) == 1
    elif not name.startswith(("forward", "functional call", "transform", "pulled")):
        assert len(buckets.waited) == len(buckets.params)
    if isinstance(found, torch.Tensor):
        assert torch.equal(found, wanted)
    elif name == "state dict":
        assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    buckets.gates.open_all()
    assert all(type(param) is torch.nn.Parameter and not param.__dict__ for param in model.parameters())


def test_forward_waits_for_what_it_uses_when_it_uses_it(pair: tuple[Model, Buckets]) -> None:
    model, buckets = pair
    names = {id(param): name for name, param in model.named_parameters()}
    buckets.close()
    seen: list[int] = []
    hook = model.norm.register_forward_pre_hook(lambda *_: seen.extend(buckets.waited))
    model(X)
    hook.remove()
    waited = [names[id(buckets.params[index])] for index in buckets.waited]
    assert waited[0] == "embed.weight" and waited[1].startswith("twice") and waited[-1].startswith("norm")
    assert not any(name.startswith("unused") for name in waited)
    assert not any(names[id(buckets.params[index])].startswith("norm") for index in seen)
    assert [names[id(buckets.params[index])] for index in buckets.gates.closed] == ["unused.weight", "unused.bias"]


def test_a_scripted_module_waits_for_everything() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    buckets = Buckets(model)
    scripted = torch.jit.trace(model, torch.ones(1, 2))
    buckets.close()
    scripted(torch.ones(1, 2))
    assert len(buckets.waited) == 4 and not buckets.gates.closed
    buckets.gates.remove()


class WithMethod(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight

    @torch.jit.export
    def other(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight


def test_a_scripted_method_waits_for_everything() -> None:
    model = torch.jit.script(WithMethod())
    buckets = Buckets(model)
    buckets.close()
    assert torch.equal(model.other(torch.zeros(2)), torch.full((2,), 2.0)) and buckets.waited == [0]
    buckets.gates.remove()


def test_a_trace_does_not_contain_the_update(pair: tuple[Model, Buckets]) -> None:
    model, buckets = pair
    buckets.close()
    traced = torch.jit.trace(model.twice, torch.ones(4), check_trace=False)
    before = model.twice.weight.detach().clone()
    assert torch.equal(traced(torch.ones(4)), model.twice(torch.ones(4))) and torch.equal(model.twice.weight, before)


def test_a_wait_that_does_not_open_its_gate_is_an_error() -> None:
    param = torch.nn.Parameter(torch.ones(2))
    gates = ForwardGates(lambda index: None)
    gates.close(3, [param])
    with pytest.raises(StarError, match="bucket 3"):
        param.sum()
    gates.remove()
    assert float(param.sum()) == 2.0


def test_a_gate_that_is_closed_again_meanwhile_is_waited_for_again() -> None:
    param = torch.nn.Parameter(torch.ones(2))
    waited: list[int] = []

    def wait(index: int) -> None:
        waited.append(index)
        gates.open(index)
        if len(waited) < 3:  # As the training thread does, while another thread comes back from its wait.
            gates.close(index, [param])

    gates = ForwardGates(wait)
    gates.close(0, [param])
    assert float(param.detach().sum()) == 2.0 and waited == [0, 0, 0]
    gates.remove()


def test_form_and_place_are_read_without_a_wait() -> None:
    param = torch.nn.Parameter(torch.ones(2, 3))
    gates = ForwardGates(lambda index: None)
    gates.close(0, [param])
    assert torch.empty_like(param, device="meta").stride() == (3, 1) and param.stride() == (3, 1)
    assert param.numel() == 6 and param.dtype == torch.float32 and type(torch.zeros_like(param)) is torch.Tensor
    gates.remove()


def test_a_class_of_parameters_of_the_users_is_kept() -> None:
    class Own(torch.nn.Parameter):
        pass

    param = Own(torch.ones(2))
    waited: list[int] = []

    def wait(index: int) -> None:
        waited.append(index)
        gates.open(index)

    gates = ForwardGates(wait)
    gates.close(0, [param])
    assert isinstance(param, Own)
    assert float((param * 2).sum()) == 4.0 and waited == [0] and type(param) is Own
    gates.remove()


def test_hooks_are_removed() -> None:
    before = len(torch.nn.modules.module._global_forward_pre_hooks)
    gates = ForwardGates(lambda index: None)
    gates.close(0, [torch.nn.Parameter(torch.ones(1))])
    assert len(torch.nn.modules.module._global_forward_pre_hooks) == before + 1
    gates.remove()
    assert len(torch.nn.modules.module._global_forward_pre_hooks) == before
