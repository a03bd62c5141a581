"""The straggler laboratory without Horovod: schedules, traces, figures, quotas, a driver whose job dies."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from benchmarks.freezer import Freezer
from benchmarks.killed import Watch
from benchmarks.launch import JobFailed, run_job
from benchmarks.link_rates import LinkRates, ask_for_rate
from benchmarks.measures import (
    REQUIRED_KEYS,
    in_force,
    median_or_none,
    model_bytes,
    summarize,
    time_to_accuracy_s,
)
from benchmarks.netns import Network, NetworkError, burst_bytes, hosts_text, stale_names
from benchmarks.options import build_spec, make_parser, target_for
from benchmarks.overhead import summarize_blocks
from benchmarks.plot import member_strip, plot
from benchmarks.quota import CpuGroup, CpuQuota, QuotaError, find_cpu_group, own_group
from benchmarks.report import sentence, straggler_phrase, table
from benchmarks.scenarios import (
    SCENARIOS,
    ScenarioError,
    baseline,
    bound_s,
    default_modes,
    link_slowdown,
    make_scenario,
)
from benchmarks.spec import ALL_VARIANTS, RunRecord, RunSpec, write_json
from benchmarks.traces import TraceError, read_trace, synthetic_trace, write_trace
from benchmarks.traces import main as traces_main
from benchmarks.tta import main as tta_main
from scheduler.mode_names import parse_mode


class TestScenarios:
    def test_one_slow_slows_the_last_rank_in_every_step(self) -> None:
        scenario = make_scenario("one-slow", 4)
        assert [scenario.slowdown(rank, 17) for rank in range(4)] == [1.0, 1.0, 1.0, 4.0]
        assert scenario.capacity() == pytest.approx(3.25)
        assert scenario.quorum() == 3

    def test_two_slow_slows_the_last_two_ranks(self) -> None:
        scenario = make_scenario("two-slow", 4)
        assert scenario.rows == ((1.0, 1.0, 2.0, 2.0),)
        assert scenario.capacity() == pytest.approx(3.0)
        assert scenario.quorum() == 2

    def test_rotating_changes_every_five_steps_and_comes_round(self) -> None:
        scenario = make_scenario("rotating", 4)
        slow = [max(range(4), key=lambda rank: scenario.slowdown(rank, step)) for step in range(45)]
        assert slow == [(step // 5) % 4 for step in range(45)]
        assert scenario.capacity() == pytest.approx(3.25)
        assert scenario.quorum() == 3

    def test_none_has_full_capacity(self) -> None:
        scenario = make_scenario("none", 3)
        assert scenario.capacity() == 3.0
        assert scenario.quorum() == 2

    def test_without_stragglers_is_even(self) -> None:
        assert make_scenario("rotating", 4).without_stragglers().rows == ((1.0,) * 4,)

    def test_own_slowdown(self) -> None:
        assert make_scenario("one-slow", 2, slowdown=8.0).rows == ((1.0, 8.0),)

    @pytest.mark.parametrize(
        ("name", "ranks", "options", "message"),
        [
            ("sideways", 4, {}, "expected one of none"),
            ("one-slow", 1, {}, "at least 2"),
            ("two-slow", 2, {}, "at least 3"),
            ("one-slow", 4, {"slowdown": 0.5}, "expected 1 to 1000"),
            ("trace", 4, {}, "--trace FILE"),
            ("trace", 4, {"trace": [[1.0, 2.0]]}, "2 ranks, the job 4"),
        ],
    )
    def test_bad_scenarios(self, name: str, ranks: int, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ScenarioError, match=message):
            make_scenario(name, ranks, **options)

    def test_trace_repeats_and_drops_columns_it_does_not_need(self) -> None:
        scenario = make_scenario("trace", 2, trace=[[1.0, 2.0, 9.0], [4.0, 1.0, 9.0]])
        assert [scenario.slowdown(0, step) for step in range(4)] == [1.0, 4.0, 1.0, 4.0]
        assert scenario.capacity() == pytest.approx((1.5 + 1.25) / 2)

    def test_bound(self) -> None:
        assert bound_s(10.0, 3.25, 4) == pytest.approx(12.3077, abs=1e-4)
        assert bound_s(10.0, 4.0, 4) == 10.0
        with pytest.raises(ScenarioError, match="more than 0"):
            bound_s(10.0, 0.0, 4)


class TestNewScenarios:
    """Slow links, freezes, starvation and deaths, as far as they are arithmetic."""

    @pytest.mark.parametrize(
        ("name", "last"), [("slow-link", 10.0), ("frozen", 1.5), ("starved", 10.0), ("killed-worker", 1.0)]
    )
    def test_only_the_last_rank_is_slow_and_not_by_its_device(self, name: str, last: float) -> None:
        scenario = make_scenario(name, 4)
        assert scenario.rows == ((1.0, 1.0, 1.0, last),)
        assert [scenario.device_slowdown(rank, 0) for rank in range(4)] == [1.0] * 4

    def test_emulated_slowness_is_the_device_s(self) -> None:
        assert make_scenario("one-slow", 4).device_slowdown(3, 0) == 4.0

    @pytest.mark.parametrize("name", ["none", "frozen", "killed-worker", "killed-server"])
    def test_some_take_no_slowdown(self, name: str) -> None:
        with pytest.raises(ScenarioError, match="takes none"):
            make_scenario(name, 4, slowdown=3.0)

    @pytest.mark.parametrize("name", [name for name in SCENARIOS if name != "trace"])
    def test_default_modes_are_modes(self, name: str) -> None:
        for mode in default_modes(make_scenario(name, 4)):
            assert parse_mode(mode, 4) is not None

    def test_default_modes_leave_the_slow_ranks_out(self) -> None:
        assert default_modes(make_scenario("slow-link", 4)) == ("subgroup(0,1,2)", "ps(3)")
        assert "partial(2)" in default_modes(make_scenario("two-slow", 4))

    @pytest.mark.parametrize(
        ("name", "rule", "quorum"),
        [("ASGD", "x", 1), ("SSP", "ssp", 1), ("DynSGD", "x", 1), ("Sync-opt", "backup", 3), ("ps(2)", "x", 2)],
    )
    def test_names_of_the_literature(self, name: str, rule: str, quorum: int) -> None:
        plan = parse_mode(baseline(name, 1), 4)
        assert plan is not None and (plan.mode, plan.rule, plan.quorum) == ("ps", rule, quorum)

    def test_link_slowdown(self) -> None:
        # 1 MB at 8 Mbit/s takes a second, at 80 Mbit/s a tenth: a step of 0.5 s becomes one of 1.4 s.
        assert link_slowdown(0.5, 1e6, 80e6, 8e6) == pytest.approx(1.4 / 0.5)
        assert link_slowdown(0.5, 1e6, 8e6, 8e6) == 1.0
        with pytest.raises(ScenarioError, match="no faster than the first"):
            link_slowdown(0.5, 1e6, 8e6, 80e6)

    def test_bound_of_a_slow_link_comes_from_the_step(self) -> None:
        spec = _spec(scenario="slow-link", rows=((1.0, 1.0, 1.0, 10.0),), link_bits_per_s=80e6, variants=ALL_VARIANTS)
        summary = summarize(spec, 0.9, _records())
        step_s = 18.0 / 100
        last = link_slowdown(step_s, model_bytes(spec), 80e6, 8e6)
        assert summary["bound_s"] == pytest.approx(9.0 * 4 / (3.0 + 1.0 / last))


class TestOptions:
    """The command line becomes a `RunSpec`, or a message."""

    def _spec(self, *words: str) -> RunSpec:
        return build_spec(make_parser().parse_args(words))

    def test_target_is_the_user_s_or_fits_the_scenario(self) -> None:
        for words, target in ((["--target", "0.5"], 0.5), ([], 0.93), (["--scenario", "frozen"], 0.95)):
            assert target_for(make_parser().parse_args(words)) == target
        with pytest.raises(ValueError, match="between 0 and 1"):
            target_for(make_parser().parse_args(["--target", "1.5"]))

    def test_modes_are_kept_in_order(self) -> None:
        spec = self._spec("--scenario", "one-slow", "--modes", " partial(3); subgroup(0,1,2) ;ASGD;")
        assert spec.modes == ("partial(3)", "subgroup(0,1,2)", "ASGD")
        assert spec.trained == (*ALL_VARIANTS, *spec.modes)

    def test_defaults_fit_the_scenario(self) -> None:
        frozen = self._spec("--scenario", "frozen")
        assert (frozen.epochs, frozen.passes, frozen.steps) == (5, 4, 400)
        assert frozen.variants == ("straggler_free", "plain", "star")
        assert frozen.modes == ("partial(3)", "ps(3)", "asgd")
        assert self._spec("--variants", "plain").modes == ()
        assert self._spec("--scenario", "frozen", "--epochs", "3").epochs == 3

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (("--modes", "auto"), "no fixed mode"),
            (("--modes", "ps(9)"), "quorum m is 9"),
            (("--modes", "sideways"), "sideways"),
            (("--modes", "asgd;asgd"), "each mode once"),
            (("--variants", "plain,plain"), "each once"),
            (("--link-mbit", "10"), "belongs to scenario slow-link"),
            (("--hidden-units", "-1"), "--hidden-units is -1"),
        ],
    )
    def test_bad_options(self, words: tuple[str, ...], message: str) -> None:
        with pytest.raises(ValueError, match=re.escape(message)):
            self._spec(*words)

    def test_an_impossible_scenario_is_skipped(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        monkeypatch.setattr("benchmarks.netns._program", lambda name: f"/sbin/{name}")
        assert tta_main(["--scenario", "slow-link"]) == 77
        said = capsys.readouterr().err
        assert "scenario slow-link is impossible here" in said and "need root" in said


class TestNetwork:
    """What can be said of namespaces without making any."""

    def test_names_and_addresses_differ(self) -> None:
        network = Network(4, 1e8)
        for values in zip(*(dataclasses.astuple(host) for host in network.hosts), strict=True):
            assert len(set(values)) == 4
        assert all(len(name) <= 15 for host in network.hosts for name in (host.outer, network.bridge))

    def test_hosts_text(self) -> None:
        hosts = Network(2, 1e8).hosts
        lines = hosts_text(hosts[1], hosts).splitlines()
        assert lines[0] == "127.0.0.1 localhost"
        assert lines[1] == f"{hosts[1].address} {socket.gethostname()}"
        assert lines[2:] == [f"{host.address} {host.name}" for host in hosts]

    def test_stale_names_are_those_of_drivers_that_are_gone(self) -> None:
        gone = subprocess.Popen([sys.executable, "-c", ""])
        gone.wait()
        ours, theirs = f"slab{os.getpid():x}-0", f"slab{gone.pid:x}-0"
        names = [ours, theirs, f"slab{gone.pid:x}", f"slab{gone.pid:x}v3", "slab", "eth0", "other1-0"]
        assert stale_names(names) == [theirs, f"slab{gone.pid:x}", f"slab{gone.pid:x}v3"]

    def test_burst_holds_a_large_packet_and_two_refills(self) -> None:
        assert burst_bytes(1e6) == 64 * 1024
        assert burst_bytes(1e9) == 1_000_000

    def test_a_rate_nobody_sets_ends_the_wait(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("benchmarks.link_rates.ASK_DEADLINE_S", 0.1)
        with pytest.raises(NetworkError, match="nobody rated a link"):
            ask_for_rate(tmp_path, 1e6)

    def test_wishes_for_a_rate_are_answered(self, tmp_path: Path) -> None:
        network = _Rates()
        with LinkRates(network, tmp_path):  # type: ignore[arg-type]
            ask_for_rate(tmp_path, 2e7)
            with pytest.raises(NetworkError, match="no such device"):
                ask_for_rate(tmp_path, 3e7)
        assert network.set_to == [(3, 2e7), (3, 3e7)]


class _Rates:
    """In place of a `Network`: notes what it is asked, refuses one rate."""

    hosts = (None,) * 4

    def __init__(self) -> None:
        self.set_to: list[tuple[int, float]] = []

    def set_rate(self, index: int, bits_per_s: float) -> None:
        self.set_to.append((index, bits_per_s))
        if bits_per_s == 3e7:
            raise NetworkError("no such device")


class TestFreezer:
    """Stops a process that counts, and lets it go on."""

    def test_a_process_is_stopped_and_continued(self) -> None:
        script = (
            "import time\nfrom benchmarks.freezer import Freezer\nlongest = 0.0\n"
            "with Freezer(0.4, 0.6):\n"
            "    begin = last = time.monotonic()\n"
            "    while last - begin < 2.0:\n"
            "        time.sleep(0.01)\n        now = time.monotonic()\n"
            "        longest = max(longest, now - last)\n        last = now\n"
            "print(longest)"
        )
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
        assert float(done.stdout) > 0.3

    def test_bad_times(self) -> None:
        with pytest.raises(ValueError, match="expected more than 0"):
            Freezer(2.0, 2.0)


class TestWatch:
    """What a death costs, from the steps a rank sees."""

    def test_gaps_count_from_the_death_to_the_rebuilding(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = iter([0.0, 5.0, 6.0, 9.0, 20.0])
        monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
        watch = Watch()
        watch.step(1)  # after 5 s, before the death
        watch.begin()
        watch.step(2)
        watch.step(3)
        watch.end()
        watch.step(1)  # two steps to make again
        assert (watch.recovery_s, watch.lost_steps) == (3.0, 2)


class TestTraces:
    @pytest.mark.parametrize("suffix", [".csv", ".json"])
    def test_what_is_written_is_read(self, tmp_path: Path, suffix: str) -> None:
        rows = [[1.0, 2.5], [4.0, 1.0]]
        write_trace(tmp_path / f"trace{suffix}", rows)
        assert read_trace(tmp_path / f"trace{suffix}") == rows

    @pytest.mark.parametrize(
        ("name", "text", "message"),
        [
            ("a.csv", "", "expected the header rank0"),
            ("a.csv", "slow,fast\n1,2\n", "expected the header rank0"),
            ("a.csv", "rank0,rank1\n", "has no steps"),
            ("a.csv", "rank0,rank1\n1,1\n1\n", "row 3: 1 values; expected 2"),
            ("a.csv", "rank0,rank1\n1,fast\n", "row 2: 'fast' is no slowdown"),
            ("a.csv", "rank0,rank1\n1,0\n", "row 2: '0' is no slowdown"),
            ("a.csv", "rank0,rank1\n1,nan\n", "is no slowdown"),
            ("a.csv", "rank0,rank1\n1,inf\n", "is no slowdown"),
            ("a.json", "{", "is not JSON"),
            ("a.json", "[[1, 2]]", "lacks"),
            ("a.json", '{"slowdown": [1, 2]}', "lacks"),
            ("a.json", '{"slowdown": []}', "has no steps"),
            ("a.json", '{"slowdown": [[1, true]]}', "is no slowdown"),
            ("a.json", '{"slowdown": [[1, null]]}', "is no slowdown"),
        ],
    )
    def test_bad_files(self, tmp_path: Path, name: str, text: str, message: str) -> None:
        (tmp_path / name).write_text(text)
        with pytest.raises(TraceError, match=message):
            read_trace(tmp_path / name)

    def test_missing_and_binary_files(self, tmp_path: Path) -> None:
        with pytest.raises(TraceError, match=r"benchmarks\.traces writes one"):
            read_trace(tmp_path / "nowhere.csv")
        (tmp_path / "b.csv").write_bytes(b"\xff\xfe\x00")
        with pytest.raises(TraceError, match="cannot read"):
            read_trace(tmp_path / "b.csv")

    def test_synthetic_trace_has_the_asked_share_and_run_length(self) -> None:
        rows = synthetic_trace(ranks=8, steps=4000, seed=1, share=0.15, mean_run_steps=3.4)
        assert rows == synthetic_trace(ranks=8, steps=4000, seed=1, share=0.15, mean_run_steps=3.4)
        slow = [[row[rank] > 1.4 for row in rows] for rank in range(8)]
        share = sum(map(sum, slow)) / (8 * 4000)
        starts = sum(now and not before for flags in slow for before, now in itertools.pairwise(flags))
        assert share == pytest.approx(0.15, abs=0.02)
        assert sum(map(sum, slow)) / starts == pytest.approx(3.4, rel=0.1)

    def test_command(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert traces_main([str(tmp_path / "t.csv"), "--ranks", "3", "--steps", "7"]) == 0
        rows = read_trace(tmp_path / "t.csv")
        assert (len(rows), len(rows[0])) == (7, 3)
        assert traces_main([str(tmp_path / "t.csv"), "--steps", "0"]) == 2
        assert "expected at least 1" in capsys.readouterr().err


class TestMeasures:
    def test_a_single_lucky_evaluation_does_not_count(self) -> None:
        accuracy = [0.1, 0.95, 0.2, 0.5, 0.92, 0.93, 0.91]
        assert time_to_accuracy_s(range(7), accuracy, 0.9) == 5.0

    def test_never_reached(self) -> None:
        assert time_to_accuracy_s([1.0, 2.0, 3.0, 4.0], [0.1, 0.2, 0.3, 0.4], 0.9) is None
        assert time_to_accuracy_s([], [], 0.9) is None
        assert time_to_accuracy_s([1.0, 2.0], [1.0, 1.0], 0.9) is None

    def test_lengths_must_agree(self) -> None:
        with pytest.raises(ValueError, match="1 times and 2 accuracies"):
            time_to_accuracy_s([1.0], [0.1, 0.2], 0.9)

    def test_median_counts_missing_seeds_as_late(self) -> None:
        assert median_or_none([3.0, None, 1.0]) == 3.0
        assert median_or_none([None, None, 1.0]) is None
        assert median_or_none([]) is None

    def test_summary_has_all_keys_and_right_figures(self) -> None:
        summary = summarize(_spec(), 0.9, _records())
        assert set(REQUIRED_KEYS) <= set(summary)
        assert summary["plain_s"] == pytest.approx(30.0)
        assert summary["star_s"] == pytest.approx(12.0)
        assert summary["ratio"] == pytest.approx(0.4)
        assert summary["bound_s"] == pytest.approx(9.0 * 4 / 3.25)
        assert summary["bound_ratio"] == pytest.approx(12.0 / (9.0 * 4 / 3.25))
        assert summary["own_bound_ratio"] == pytest.approx(12.0 / (8.0 * 4 / 3.25))
        assert summary["final_accuracy"]["star"] == pytest.approx(0.95)
        assert (summary["folds"], summary["drops"], summary["max_staleness"]) == (10, 0, 4)
        assert len(summary["variants"]["star"]["seeds"]) == 2
        json.dumps(summary)

    def test_modes_stand_beside_auto(self) -> None:
        records = _records()
        for seed in (0, 1):
            fixed = dataclasses.replace(records[0], variant="ps(3)", seed=seed, times_s=[1.0, 2.0, 3.0, 15.0, 16.0])
            fixed.timeline = [{"mode": "sync"}, {"mode": "ps(3)"}, {"mode": "ps(3)"}, {"mode": "ps(3)"}]
            records.append(fixed)
        summary = summarize(_spec(modes=("ps(3)",)), 0.9, records)
        mode = summary["modes"]["ps(3)"]
        assert (mode["seconds"], mode["ratio"]) == (15.0, 0.5)
        assert (mode["train_s"], mode["global_steps"], mode["in_force"]) == (18.0, 100, 0.75)
        assert mode["final_accuracy"] == pytest.approx(0.95)
        assert [run["seed"] for run in mode["per_seed"]] == [0, 1]
        assert table(summary).row_count == 6 and "ps(3)" not in summary["variants"]

    def test_the_table_of_one_seed_fits_a_usual_terminal(self) -> None:
        summary = summarize(_spec(seeds=(0,)), 0.9, [each for each in _records() if each.seed == 0])
        console = Console(width=80, file=io.StringIO(), color_system=None)
        console.print(table(summary))
        printed = console.file.getvalue()  # type: ignore[attr-defined]
        assert "Horovod, nobody slow" in printed and "stale" in printed and "…" not in printed

    def test_in_force_of_no_steps(self) -> None:
        assert in_force([]) == 0.0

    def test_deaths_are_told_by_the_worst_seed(self) -> None:
        records = _records()
        for record in records:
            record.recovery_s = 9.0 if record.variant == "plain" else 1.0 + record.seed
            record.killed = int(record.variant in ("plain", "star"))
        summary = summarize(_spec(scenario="killed-server"), 0.9, records)
        assert (summary["killed"], summary["recovery_s"], summary["lost_steps"]) == (2, 2.0, 0)
        assert "recovery_s" not in summarize(_spec(), 0.9, _records())

    def test_summary_of_a_part_of_the_variants(self) -> None:
        spec = _spec(variants=("plain",))
        summary = summarize(spec, 0.9, [record for record in _records() if record.variant == "plain"])
        assert set(REQUIRED_KEYS) <= set(summary)
        assert summary["star_s"] is None and summary["ratio"] is None and summary["bound_s"] is None

    def test_sentence_names_the_straggler_and_both_times(self) -> None:
        summary = summarize(_spec(), 0.9, _records())
        text = sentence(summary)
        assert text.startswith("With rank 3 four times slower, plain Horovod took 30.0 s")
        assert "star_hvd took 12.0 s" in text
        for name in SCENARIOS:
            assert straggler_phrase({**summary, "scenario": name}).startswith("With ")

    def test_sentence_says_when_the_target_was_missed(self) -> None:
        summary = summarize(_spec(), 0.99, _records())
        assert "did not reach 99.0 %" in sentence(summary)

    def test_overhead_summary(self) -> None:
        blocks = {
            "plain": [[0.1, 0.1, 0.1], [0.2, 0.2, 0.2]],
            "star": [[0.101, 0.101, 0.3], [0.202, 0.202, 0.2]],
        }
        summary = summarize_blocks(blocks, [{"folds": 0, "drops": 0}, {"folds": 1, "drops": 0, "late": 2}])
        assert summary["block_ratios"] == pytest.approx([1.01, 1.01])
        assert summary["ratio"] == pytest.approx(0.201 / 0.15)
        assert (summary["folds"], summary["late"]) == (1, 2)


def _spec(**changes: Any) -> RunSpec:
    values: dict[str, Any] = dict(
        scenario="one-slow",
        rows=((1.0, 1.0, 1.0, 4.0),),
        ranks=4,
        variants=ALL_VARIANTS,
        seeds=(0, 1),
        dataset="digits",
        train_samples=1280,
        epochs=1,
        batch_samples=16,
        learning_rate=0.1,
        momentum=0.9,
        device_s=0.03,
        eval_every_steps=2,
    )
    return RunSpec(**{**values, **changes})


def _records() -> list[RunRecord]:
    reached_s = {"straggler_free": 9.0, "plain": 30.0, "drop": 13.0, "star": 12.0, "star_free": 8.0}
    return [
        RunRecord(
            variant=variant,
            seed=seed,
            train_s=2 * time_s,
            global_steps=100,
            folds=5 if variant == "star" else 0,
            max_staleness=4 if variant == "star" else 0,
            times_s=[1.0, 2.0, 3.0, time_s, time_s + 1.0],
            steps=[2, 4, 6, 8, 10],
            accuracies=[0.1, 0.2, 0.91, 0.92, 0.95],
        )
        for variant, time_s in reached_s.items()
        for seed in (0, 1)
    ]


class TestPlot:
    """What the lower part of the plot is drawn from."""

    def test_strip_is_on_the_clock_of_the_curve(self) -> None:
        timeline = [
            {"step": 0, "time_s": 100.5, "members": [0, 1], "mode": "sync", "folds": 0.0},
            {"step": 1, "time_s": 101.0, "members": [0], "mode": "partial(1)", "folds": 0.0},
            {"step": 2, "time_s": 101.5, "members": [0], "mode": "partial(1)", "folds": 1.0},
        ]
        strip = member_strip({"timeline": timeline, "times_s": [1.0, 1.5], "steps": [2, 3]}, ranks=2)
        assert strip is not None
        assert strip.edges_s == pytest.approx([0.0, 0.5, 1.0, 1.5])
        assert strip.members == [[1, 1, 1], [1, 0, 0]]
        assert strip.fold_times_s == pytest.approx([1.5])
        assert strip.modes == ["sync", "partial(1)", "partial(1)"]

    def test_no_strip_without_a_timeline(self) -> None:
        assert member_strip(None, ranks=2) is None
        assert member_strip({"timeline": [], "times_s": [], "steps": []}, ranks=2) is None

    def test_image_is_written(self, tmp_path: Path) -> None:
        plot(summarize(_spec(), 0.9, _records()), tmp_path / "new" / "image.png")
        assert (tmp_path / "new" / "image.png").stat().st_size > 0


class TestFiles:
    def test_spec_survives_the_file(self, tmp_path: Path) -> None:
        write_json(tmp_path / "spec.json", dataclasses.asdict(_spec()))
        assert RunSpec.read(tmp_path / "spec.json") == _spec()

    def test_failed_write_leaves_the_old_file(self, tmp_path: Path) -> None:
        path = tmp_path / "out" / "result.json"
        write_json(path, {"a": 1})
        circle: list[Any] = []
        circle.append(circle)
        with pytest.raises(ValueError, match="Circular"):
            write_json(path, circle)
        assert json.loads(path.read_text()) == {"a": 1}
        assert [entry.name for entry in path.parent.iterdir()] == ["result.json"]


class TestQuota:
    """Detection on made-up file systems."""

    def _proc(self, tmp_path: Path, text: str) -> Path:
        path = tmp_path / "proc_cgroup"
        path.write_text(text)
        return path

    def test_own_group(self) -> None:
        text = "4:memory:/a\n3:cpu,cpuacct:/b\n0::/c\n"
        assert own_group(text, "cpu") == "/b"
        assert own_group(text, "") == "/c"
        assert own_group(text, "pids") is None

    @pytest.mark.parametrize("folder", ["cpu", "cpu,cpuacct"])
    def test_version_1(self, tmp_path: Path, folder: str) -> None:
        own = tmp_path / "fs" / folder / "job"
        own.mkdir(parents=True)
        (own.parent / "cgroup.procs").touch()
        group = find_cpu_group(tmp_path / "fs", self._proc(tmp_path, "1:cpu,cpuacct:/job\n"))
        assert group == CpuGroup(version=1, path=own, home=own)

    def test_version_1_with_the_path_of_the_host(self, tmp_path: Path) -> None:
        mount = tmp_path / "fs" / "cpu"
        mount.mkdir(parents=True)
        (mount / "cgroup.procs").touch()
        group = find_cpu_group(tmp_path / "fs", self._proc(tmp_path, "1:cpu:/docker/0123\n"))
        assert group.path == mount

    def test_version_1_read_only(self, tmp_path: Path) -> None:
        (tmp_path / "fs" / "cpu").mkdir(parents=True)
        (tmp_path / "fs" / "cpu" / "cgroup.procs").touch()
        with pytest.raises(QuotaError, match="run as root"):
            find_cpu_group(tmp_path / "fs", self._proc(tmp_path, "1:cpu:/\n"), writable=lambda _: False)

    def _version_2(self, tmp_path: Path, subtree_control: str) -> Path:
        root = tmp_path / "fs"
        (root / "slice" / "job").mkdir(parents=True)
        (root / "cgroup.controllers").write_text("cpu memory")
        for path in (root, root / "slice"):
            (path / "cgroup.subtree_control").write_text(subtree_control)
        return root

    def test_version_2(self, tmp_path: Path) -> None:
        root = self._version_2(tmp_path, "cpu memory\n")
        group = find_cpu_group(root, self._proc(tmp_path, "0::/slice/job\n"))
        assert group == CpuGroup(version=2, path=root / "slice", home=root / "slice" / "job")

    def test_version_2_without_the_cpu_controller(self, tmp_path: Path) -> None:
        root = self._version_2(tmp_path, "memory cpuset\n")
        with pytest.raises(QuotaError, match="cpu controller"):
            find_cpu_group(root, self._proc(tmp_path, "0::/slice/job\n"))

    def test_nothing_there(self, tmp_path: Path) -> None:
        with pytest.raises(QuotaError, match="no control groups"):
            find_cpu_group(tmp_path, tmp_path / "absent")
        with pytest.raises(QuotaError, match="neither version 2"):
            find_cpu_group(tmp_path, self._proc(tmp_path, "1:memory:/\n"))

    def test_limit_that_cannot_be_written(self, tmp_path: Path) -> None:
        group = CpuGroup(version=2, path=tmp_path / "gone", home=tmp_path)
        with pytest.raises(QuotaError, match="cannot set a CPU quota"), CpuQuota(0.5, 0.1, group):
            pass

    def test_limit_on_a_made_up_group(self, tmp_path: Path) -> None:
        group = CpuGroup(version=2, path=tmp_path, home=tmp_path)
        with CpuQuota(0.25, 0.1, group):
            made = next(tmp_path.glob("straggler-*"))
            assert (made / "cpu.max").read_text() == "25000 100000"


def _job(tmp_path: Path, source: str, **options: float) -> list[dict[str, Any]]:
    seen: list[dict[str, Any]] = []
    limits = {"deadline_s": 30.0, "stall_s": 20.0, **options}
    run_job([sys.executable, "-c", source], tmp_path, on_progress=seen.append, **limits)
    return seen


class TestDriver:
    def test_progress_lines_arrive_and_the_rest_is_logged(self, tmp_path: Path) -> None:
        seen = _job(tmp_path, "print('[0]<stdout>:@progress {\"done\": 1}'); print('hello')")
        assert seen == [{"done": 1}]
        assert "hello" in (tmp_path / "log.txt").read_text()

    def test_a_worker_that_dies_is_reported_with_its_last_lines(self, tmp_path: Path) -> None:
        source = "import sys; print('@progress {broken'); print('the reason'); sys.exit(3)"
        with pytest.raises(JobFailed, match=r"(?s)exit status 3.*log\.txt.*broken.*the reason"):
            _job(tmp_path, source)

    def test_a_job_that_hangs_is_ended_with_its_children(self, tmp_path: Path) -> None:
        started_s = time.monotonic()
        with pytest.raises(JobFailed, match="printed nothing for 2 s"):
            _job(tmp_path, _parent_of_a_detached_worker(tmp_path), stall_s=2.0)
        assert time.monotonic() - started_s < 20.0
        (worker,) = tmp_path.glob("*.pid")
        assert not _runs(int(worker.stem))

    def test_a_job_that_never_ends_is_ended(self, tmp_path: Path) -> None:
        source = "import time\nwhile True: print('busy', flush=True); time.sleep(0.1)"
        with pytest.raises(JobFailed, match=r"(?s)did not end within 2 s.*busy"):
            _job(tmp_path, source, deadline_s=2.0)

    def test_a_process_id_used_again_is_left_alone(self, tmp_path: Path) -> None:
        stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"])
        try:
            path = tmp_path / f"{stranger.pid}.pid"
            path.touch()
            os.utime(path, (1.0, 1.0))  # older than the process: left by one that had the id before
            _job(tmp_path, "print('done')")
            assert stranger.poll() is None
        finally:
            stranger.kill()
            stranger.wait()


def _runs(pid: int) -> bool:
    """Whether a process is there and not only waiting to be buried by its parent."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _parent_of_a_detached_worker(run_dir: Path) -> str:
    """A command whose worker leaves its session, ignores the polite signal, and hangs."""
    worker = (
        "import os, pathlib, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        f"pathlib.Path({str(run_dir)!r}, str(os.getpid()) + '.pid').touch(); time.sleep(60)"
    )
    return (
        "import subprocess, sys, time; "
        f"subprocess.Popen([sys.executable, '-c', {worker!r}], start_new_session=True, "
        "stdout=subprocess.DEVNULL); "
        "time.sleep(60)"
    )
