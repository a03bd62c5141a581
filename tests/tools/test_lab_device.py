"""Device time in the layers of a network, networks of real sizes, input that costs something."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.lab.measures import model_bytes, summarize
from benchmarks.lab.networks import NETWORKS, layer_costs, make_network
from benchmarks.lab.options import build_spec, make_parser
from benchmarks.lab.scenarios import ScenarioError, input_slowdown, make_scenario
from benchmarks.lab.spec import PLAIN_VARIANTS, RunSpec
from benchmarks.lab.tasks import SlowSamples, defaults_for, load_task
from benchmarks.lab.training import equal_shares, make_clock, make_loader
from benchmarks.machine.device import FORWARD_PART, Device, DeviceTime, LayerClock, SleepDevice
from benchmarks.overhead import main as overhead
from benchmarks.tta import SETUP_ALLOWANCE_S, run_deadline_s
from tests.tools.lab_runs import some_records, spec_of


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small networks on several threads wait for each other where cores are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Noting(Device):
    """Notes what it is asked to spend, and how many parameters had their gradient then."""

    def __init__(self, model: nn.Module) -> None:
        self.spent: list[tuple[float, int]] = []
        self._model = model

    def spend(self, time_s: float) -> None:
        self.spent.append((time_s, sum(p.grad is not None for p in self._model.parameters())))


def stack() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))


def of_the_digits(batch: int) -> torch.Tensor:
    return load_task("digits", batch).train.tensors[0]


class TestLayerClock:
    def pass_of(self, batch: int, slowdown: float = 1.0) -> list[tuple[float, int]]:
        model = stack()
        device = Noting(model)
        shares = layer_costs(model, torch.ones(1, 4))
        with LayerClock(model, device, DeviceTime(fixed_s=0.01, per_sample_s=0.002), shares) as clock:
            clock.slowdown = slowdown
            model(torch.ones(batch, 4)).sum().backward()
        return device.spent

    @pytest.mark.parametrize(("batch", "slowdown", "expected_s"), [(10, 1.0, 0.03), (10, 4.0, 0.12), (5, 1.0, 0.02)])
    def test_a_step_takes_fixed_plus_per_sample_time(self, batch: int, slowdown: float, expected_s: float) -> None:
        assert sum(time_s for time_s, _ in self.pass_of(batch, slowdown)) == pytest.approx(expected_s)

    def test_it_is_spent_in_every_layer_forward_and_backward(self) -> None:
        spent = self.pass_of(10)
        assert len(spent) == 6
        forward = [time_s for time_s, _ in spent[:3]]
        assert sum(forward) == pytest.approx(FORWARD_PART * 0.03)
        assert forward == pytest.approx([FORWARD_PART * 0.03 * part / (32 + 64 + 16) for part in (32, 64, 16)])
        assert [time_s for time_s, _ in spent[3:]] == pytest.approx([2.0 * time_s for time_s in reversed(forward)])

    def test_gradients_of_later_layers_are_there_while_earlier_ones_work(self) -> None:
        """Else nothing could travel while the device works."""
        assert [ready for _, ready in self.pass_of(10)] == [0, 0, 0, 0, 2, 4]

    def test_no_time_without_gradients_nor_after_its_end(self) -> None:
        model = stack()
        device = Noting(model)
        always = DeviceTime(fixed_s=1.0, per_sample_s=0.0)
        with LayerClock(model, device, always, layer_costs(model, torch.ones(1, 4))), torch.no_grad():
            model(torch.ones(2, 4))
        model(torch.ones(2, 4)).sum().backward()
        assert device.spent == []

    def test_sleeps_add_up(self) -> None:
        device = SleepDevice()
        began_s = time.perf_counter()
        for _ in range(200):
            device.spend(0.0005)
        assert time.perf_counter() - began_s >= 0.098

    @pytest.mark.parametrize("network", NETWORKS)
    def test_the_laboratory_s_step_takes_the_time_of_its_spec(self, network: str) -> None:
        spec = spec_of(device_s=0.03, device_fixed_s=0.01, network=network)
        model = make_network("digits", network=network)
        found = _setting(spec, load_task("digits", 16).train)
        device = Noting(model)
        make_clock(found, model, device)
        model(of_the_digits(16)).sum().backward()
        assert sum(time_s for time_s, _ in device.spent) == pytest.approx(0.03)
        device.spent.clear()
        model(of_the_digits(4)).sum().backward()
        assert sum(time_s for time_s, _ in device.spent) == pytest.approx(0.015)


def _setting(spec: RunSpec, train: Any) -> Any:
    from benchmarks.lab.training import Setting

    class Alone:
        @staticmethod
        def size() -> int:
            return 2

    return Setting(
        spec=spec, train=train, hvd=Alone, rank=0, slow=make_scenario("none", 4), burns=False,
        run_dir=None, on_epoch=lambda *_: None,  # type: ignore[arg-type]
    )  # fmt: skip


class TestNetworks:
    @pytest.mark.parametrize("dataset", ["digits", "fashion"])
    @pytest.mark.parametrize(("network", "least_mb", "most_mb"), [("conv", 0.9, 1.1), ("transformer", 9.0, 11.0)])
    def test_gradients_have_real_sizes(self, dataset: str, network: str, least_mb: float, most_mb: float) -> None:
        assert least_mb <= model_bytes(spec_of(dataset=dataset, network=network)) / 1e6 <= most_mb

    @pytest.mark.parametrize("network", NETWORKS)
    @pytest.mark.parametrize("dataset", ["digits", "fashion"])
    def test_every_parameter_is_trained(self, dataset: str, network: str) -> None:
        model = make_network(dataset, network=network)
        x = of_the_digits(8) if dataset == "digits" else torch.rand(8, 1, 28, 28)
        nn.functional.cross_entropy(model(x), torch.arange(8)).backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name

    @pytest.mark.parametrize("network", NETWORKS)
    def test_costs_cover_the_network(self, network: str) -> None:
        model = make_network("digits", network=network)
        costs = layer_costs(model, of_the_digits(1))
        assert sum(costs.values()) == pytest.approx(1.0)
        counted = sum(p.numel() for layer in costs for p in layer.parameters())
        loose = sum(p.numel() for name, p in model.named_parameters() if name == "position")
        assert counted + loose == sum(p.numel() for p in model.parameters())

    def test_unknown_networks(self) -> None:
        with pytest.raises(ValueError, match="expected one of"):
            make_network("digits", network="lstm")

    @pytest.mark.slow
    @pytest.mark.parametrize("network", ["conv", "transformer"])
    def test_they_learn_the_digits_with_their_settings(self, network: str) -> None:
        defaults = defaults_for("digits", network)
        task = load_task("digits", defaults.train_samples)
        torch.manual_seed(0)
        model = make_network("digits", network=network)
        optimizer = torch.optim.SGD(model.parameters(), lr=defaults.learning_rate, momentum=defaults.momentum)
        batch = 4 * defaults.batch_samples
        for _ in range(defaults.epochs):
            for index in torch.randperm(defaults.train_samples).split(batch):
                x, y = task.train[index]
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
        with torch.no_grad():
            accuracy = float((model(task.test_x).argmax(1) == task.test_y).float().mean())
        assert accuracy > defaults.target_accuracy - 0.03


class TestInput:
    def test_samples_cost_time_and_stay_the_same(self) -> None:
        train = load_task("digits", 8).train
        slow = SlowSamples(train, 0.01)
        began_s = time.perf_counter()
        assert torch.equal(slow[3][0], train[3][0]) and len(slow) == 8
        assert time.perf_counter() - began_s >= 0.01

    def test_workers_load_in_their_own_processes(self) -> None:
        spec = spec_of(workers=2, input_s_per_sample=0.001)
        setting = _setting(spec, load_task("digits", 64).train)
        batches = equal_shares(setting, SlowSamples(setting.train, 0.001), 0)
        loader: Any = batches(0)
        assert loader.num_workers == 2 and loader.persistent_workers
        assert sum(len(y) for _, y in loader) == 32  # Of 64 samples on two ranks.
        assert not make_loader(spec_of(), setting.train, None).persistent_workers

    def test_what_slow_input_does_to_a_step(self) -> None:
        assert input_slowdown(0.05, 0.048, 2, 4.0) == pytest.approx(0.096 / 0.05)
        assert input_slowdown(0.2, 0.048, 2, 4.0) == 1.0  # Loaded in time.
        assert input_slowdown(0.1, 0.05, 0, 3.0) == pytest.approx(2.0)
        with pytest.raises(ScenarioError, match="more than 0"):
            input_slowdown(0.0, 0.05, 0, 3.0)

    def test_only_the_last_rank_s_input_is_slow(self) -> None:
        scenario = make_scenario("slow-input", 4)
        assert [scenario.input_slowdown(rank) for rank in range(4)] == [1.0, 1.0, 1.0, 4.0]
        assert [scenario.device_slowdown(rank, 0) for rank in range(4)] == [1.0] * 4
        assert make_scenario("one-slow", 4).input_slowdown(3) == 1.0

    def test_the_bound_of_slow_input_comes_from_the_step(self) -> None:
        rows = ((1.0, 1.0, 1.0, 4.0),)
        spec = spec_of(scenario="slow-input", rows=rows, input_s_per_sample=0.03, workers=2)
        summary = summarize(spec, 0.9, some_records())
        last = 0.03 * 16 * 4.0 / 2 / (18.0 / 100)
        assert summary["bound_s"] == pytest.approx(9.0 * 4 / (3.0 + 1.0 / last))


class TestBound:
    def test_fixed_time_changes_nothing_while_every_rank_is_worth_it(self) -> None:
        for fixed_part in (0.0, 0.2):
            assert make_scenario("one-slow", 4).capacity(fixed_part) == pytest.approx(3.25)

    def test_a_rank_whose_fixed_time_is_too_long_is_left_out(self) -> None:
        scenario = make_scenario("one-slow", 4, slowdown=100.0)
        assert scenario.capacity(0.2) == pytest.approx(4 * 3 / (0.8 * 4 + 0.2 * 3))

    @pytest.mark.parametrize("fixed_part", [0.0, 0.1, 0.5, 0.9])
    def test_against_all_shares(self, fixed_part: float) -> None:
        """The best step over all shares of 40 samples among three ranks, tried out."""
        factors = (1.0, 2.0, 7.0)
        scenario = make_scenario("trace", 3, trace=[factors])
        total = 600

        def step(shares: tuple[int, ...]) -> float:
            pairs = zip(factors, shares, strict=True)
            return max(f * (fixed_part + (1.0 - fixed_part) * b * 3 / total) for f, b in pairs if b)

        best = min(step((a, b, total - a - b)) for a in range(0, total + 1, 4) for b in range(0, total - a + 1, 4))
        bound = 3.0 / scenario.capacity(fixed_part)
        assert bound <= best + 1e-9
        assert best == pytest.approx(bound, rel=0.05)

    def test_every_row_has_its_ratio_and_feeding(self) -> None:
        summary = summarize(spec_of(), 0.9, some_records())
        bound_s = 9.0 * 4 / 3.25
        ratios = {name: one["bound_ratio"] for name, one in summary["variants"].items()}
        assert ratios["plain"] == pytest.approx(30.0 / bound_s)
        assert ratios["star"] == pytest.approx(summary["bound_ratio"])
        assert ratios["star_free"] == pytest.approx(8.0 / 9.0)
        for name, one in summary["variants"].items():
            assert one["feeding"] == ("sampler" if name in PLAIN_VARIANTS else "shard")
        sampled = summarize(spec_of(feeding="sampler"), 0.9, some_records())
        assert {one["feeding"] for one in sampled["variants"].values()} == {"sampler"}


class TestDeviceOptions:
    def spec_of(self, *words: str) -> RunSpec:
        return build_spec(make_parser().parse_args([*words, "--variants=plain"]))

    def test_device_ms_is_the_whole_of_a_usual_batch(self) -> None:
        for words in ((), ("--device-fixed-ms=3",), ("--network=conv",)):
            spec = self.spec_of("--device-ms=40", *words)
            assert spec.device_s == pytest.approx(0.04)
            assert spec.device_time.of(spec.batch_samples) == pytest.approx(0.04)
        assert self.spec_of("--device-ms=40", "--device-fixed-ms=3").device_time.of(0) == pytest.approx(0.003)
        assert self.spec_of("--device-ms=40").device_time.of(0) == pytest.approx(0.008)

    def test_per_sample_time_makes_the_whole(self) -> None:
        spec = self.spec_of("--device-per-sample-ms=2", "--device-fixed-ms=4")
        assert spec.device_s == pytest.approx(0.036)
        assert spec.device_time.per_sample_s == pytest.approx(0.002)

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (("--device-ms=5", "--device-fixed-ms=6"), "more than --device-ms of 5"),
            (("--device-ms=5", "--device-per-sample-ms=6"), "both given"),
            (("--device-per-sample-ms=-1",), "--device-per-sample-ms is -1"),
            (("--workers=-1",), "--workers is -1"),
            (("--input-ms-per-sample=-1",), "--input-ms-per-sample is -1"),
            (("--scenario=slow-input", "--input-ms-per-sample=0"), "raise --input-ms-per-sample"),
            (("--microbatches=0",), "--microbatches is 0"),
            (("--microbatches=2", "--feeding=sampler"), "leave --feeding out"),
        ],
    )
    def test_bad_options(self, words: tuple[str, ...], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            self.spec_of(*words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--workers", "2"], "belong to --feed loader"),
        (["--feed", "loader", "--workers", "-1"], "--workers is -1"),
        (["--device-ms", "1", "--device-fixed-ms", "2"], "more than --device-ms"),
        (["--mode", "garbage"], "mode is 'garbage'"),
        (["--mode", "partial(9)"], "quorum m is 9"),
        (["--ranks", "1"], "--ranks is 1; expected at least 2"),
    ],
)
def test_bad_options_of_overhead(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert overhead(words) == 2
    assert message in capsys.readouterr().err


def test_every_job_has_time_to_start() -> None:
    """A scenario whose trainings are jobs of their own needs the allowance once per training."""
    one = run_deadline_s(spec_of(scenario="killed-server", seeds=(0,)))
    assert run_deadline_s(spec_of(scenario="killed-worker", seeds=(0,))) - one == pytest.approx(4 * SETUP_ALLOWANCE_S)
