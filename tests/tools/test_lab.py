"""The straggler laboratory without Horovod: schedules, options, traces, figures."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.lab.measures import (
    REQUIRED_KEYS,
    in_force,
    median_or_none,
    model_bytes,
    summarize,
    time_to_accuracy_s,
)
from benchmarks.lab.options import build_spec, make_parser, target_for
from benchmarks.lab.report import sentence, straggler_phrase, table
from benchmarks.lab.scenarios import (
    SCENARIOS,
    ScenarioError,
    baseline,
    bound_s,
    default_modes,
    link_slowdown,
    make_scenario,
)
from benchmarks.lab.spec import ALL_VARIANTS, RunSpec
from benchmarks.overhead import summarize_blocks
from benchmarks.traces import TraceError, read_trace, synthetic_trace, write_trace
from benchmarks.traces import main as traces_main
from benchmarks.tta import main as tta_main
from scheduler.plan.mode_names import parse_mode
from tests.tools.lab_runs import some_records, spec_of


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
        spec = spec_of(scenario="slow-link", rows=((1.0, 1.0, 1.0, 10.0),), link_bits_per_s=80e6, variants=ALL_VARIANTS)
        summary = summarize(spec, 0.9, some_records())
        step_s = 18.0 / 100
        last = link_slowdown(step_s, model_bytes(spec), 80e6, 8e6)
        assert summary["bound_s"] == pytest.approx(9.0 * 4 / (3.0 + 1.0 / last))


class TestOptions:
    """The command line becomes a `RunSpec`, or a message."""

    def spec_of(self, *words: str) -> RunSpec:
        return build_spec(make_parser().parse_args(words))

    def test_target_is_the_user_s_or_fits_the_scenario(self) -> None:
        for words, target in ((["--target", "0.5"], 0.5), ([], 0.93), (["--scenario", "frozen"], 0.95)):
            assert target_for(make_parser().parse_args(words)) == target
        with pytest.raises(ValueError, match="between 0 and 1"):
            target_for(make_parser().parse_args(["--target", "1.5"]))

    def test_modes_are_kept_in_order(self) -> None:
        spec = self.spec_of("--scenario", "one-slow", "--modes", " partial(3); subgroup(0,1,2) ;ASGD;")
        assert spec.modes == ("partial(3)", "subgroup(0,1,2)", "ASGD")
        assert spec.trained == (*ALL_VARIANTS, *spec.modes)

    def test_defaults_fit_the_scenario(self) -> None:
        frozen = self.spec_of("--scenario", "frozen")
        assert (frozen.epochs, frozen.passes, frozen.steps) == (5, 4, 400)
        assert frozen.variants == ("straggler_free", "plain", "star")
        assert frozen.modes == ("partial(3)", "ps(3)", "asgd")
        assert self.spec_of("--variants", "plain").modes == ()
        assert self.spec_of("--scenario", "frozen", "--epochs", "3").epochs == 3

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
            (("--mode", "garbage"), "mode is 'garbage'"),
            (("--mode", "partial(9)"), "quorum m is 9"),
            (("--mode", "partial(3)", "--accuracy", "exact"), "--mode is partial(3), which is not synchronous SGD"),
            (("--scenario", "none", "--ranks", "1"), "--ranks is 1; expected at least 2"),
            (("--scenario", "none", "--ranks", "1", "--variants", "plain", "--modes", "sync"), "--ranks is 1"),
            (("--epochs", "0"), "--epochs is 0; expected at least 1"),
            (("--passes", "0"), "--passes is 0"),
            (("--train-samples", "0"), "--train-samples is 0"),
            (("--train-samples", "-5"), "--train-samples is -5"),
            (("--hidden-units", "0"), "--hidden-units is 0"),
            (("--deadline-s", "-1"), "--deadline-s is -1"),
            (("--deadline-s", "0"), "--deadline-s is 0"),
            (("--stall-s", "nan"), "--stall-s is nan"),
        ],
    )
    def test_bad_options(self, words: tuple[str, ...], message: str) -> None:
        with pytest.raises(ValueError, match=re.escape(message)):
            self.spec_of(*words)

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (("--compression", "auto", "--overlap"), "without --compression, --overlap; leave that out"),
            (("--input-ms-per-sample", "2", "--workers", "1"), "without --input-ms-per-sample, --workers"),
            (("--log-runs",), "without --log-runs"),
            (("--variants", "plain,drop"), "no variant drop"),
        ],
    )
    def test_what_an_elastic_training_does_not_do_is_refused(self, words: tuple[str, ...], message: str) -> None:
        with pytest.raises(ScenarioError, match=re.escape(message)):
            self.spec_of("--scenario", "killed-worker", *words)

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (("--scenario", "starved", "--quota-period-ms", "10"), "raise --quota-period-ms to at least 20"),
            (("--scenario", "quota", "--quota-period-ms", "2"), "raise --quota-period-ms to at least 8"),
            (("--scenario", "starved", "--slowdown", "1000"), "lower --slowdown"),
        ],
    )
    def test_a_quota_shorter_than_the_kernel_takes_is_refused(
        self, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], message: str
    ) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
        monkeypatch.setattr("benchmarks.lab.options.find_cpu_group", lambda: None)
        with pytest.raises(ScenarioError, match=re.escape(message)):
            self.spec_of(*words)
        spec = self.spec_of("--scenario", "starved", "--quota-period-ms", "20")
        assert spec.quota_cores * spec.quota_period_s == pytest.approx(1e-3)

    def test_modes_that_are_exact_go_with_exact(self) -> None:
        for mode in ("auto", "sync", "sync(balanced)", "sync(steal)"):
            assert self.spec_of("--mode", mode, "--accuracy", "exact").mode == mode

    def test_one_rank_trains_plain_horovod(self) -> None:
        assert self.spec_of("--scenario", "none", "--ranks", "1", "--variants", "plain").ranks == 1

    def test_an_elastic_training_has_the_other_options(self) -> None:
        usual = ("--passes", "1", "--feeding", "shard", "--microbatches", "1")
        spec = self.spec_of("--scenario", "killed-worker", "--seeds", "1", "--mode", "partial(3)", *usual)
        assert (spec.seeds, spec.mode, spec.modes) == ((0,), "partial(3)", ("ps(2)",))

    def test_an_impossible_scenario_is_skipped(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        monkeypatch.setattr("benchmarks.machine.netns.find_program", lambda name: f"/sbin/{name}")
        assert tta_main(["--scenario", "slow-link"]) == 77
        said = capsys.readouterr().err
        assert "scenario slow-link is impossible here" in said and "need root" in said


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
        summary = summarize(spec_of(), 0.9, some_records())
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
        records = some_records()
        for seed in (0, 1):
            fixed = dataclasses.replace(records[0], variant="ps(3)", seed=seed, times_s=[1.0, 2.0, 3.0, 15.0, 16.0])
            fixed.timeline = [{"mode": "sync"}, {"mode": "ps(3)"}, {"mode": "ps(3)"}, {"mode": "ps(3)"}]
            records.append(fixed)
        summary = summarize(spec_of(modes=("ps(3)",)), 0.9, records)
        mode = summary["modes"]["ps(3)"]
        assert (mode["seconds"], mode["ratio"]) == (15.0, 0.5)
        assert (mode["train_s"], mode["global_steps"], mode["in_force"]) == (18.0, 100, 0.75)
        assert mode["final_accuracy"] == pytest.approx(0.95)
        assert [run["seed"] for run in mode["per_seed"]] == [0, 1]
        assert table(summary).row_count == 6 and "ps(3)" not in summary["variants"]

    def test_the_table_of_one_seed_fits_a_usual_terminal(self) -> None:
        summary = summarize(spec_of(seeds=(0,)), 0.9, [each for each in some_records() if each.seed == 0])
        console = Console(width=80, file=io.StringIO(), color_system=None)
        console.print(table(summary))
        printed = console.file.getvalue()  # type: ignore[attr-defined]
        assert "Horovod, none slow" in printed and "queue" in printed and "…" not in printed
        assert max(map(len, map(str.rstrip, printed.splitlines()))) <= 80

    def test_in_force_of_no_steps(self) -> None:
        assert in_force([]) == 0.0

    def test_deaths_are_told_by_the_worst_seed(self) -> None:
        records = some_records()
        for record in records:
            record.recovery_s = 9.0 if record.variant == "plain" else 1.0 + record.seed
            record.killed = int(record.variant in ("plain", "star"))
        summary = summarize(spec_of(scenario="killed-server"), 0.9, records)
        assert (summary["killed"], summary["recovery_s"], summary["lost_steps"]) == (2, 2.0, 0)
        assert "recovery_s" not in summarize(spec_of(), 0.9, some_records())

    def test_summary_of_a_part_of_the_variants(self) -> None:
        spec = spec_of(variants=("plain",))
        summary = summarize(spec, 0.9, [record for record in some_records() if record.variant == "plain"])
        assert set(REQUIRED_KEYS) <= set(summary)
        assert summary["star_s"] is None and summary["ratio"] is None and summary["bound_s"] is None

    def test_sentence_names_the_straggler_and_both_times(self) -> None:
        summary = summarize(spec_of(), 0.9, some_records())
        text = sentence(summary)
        assert text.startswith("With rank 3 four times slower, plain Horovod took 30.0 s")
        assert "star_hvd took 12.0 s" in text
        for name in SCENARIOS:
            assert straggler_phrase({**summary, "scenario": name}).startswith("With ")

    def test_sentence_says_when_the_target_was_missed(self) -> None:
        summary = summarize(spec_of(), 0.99, some_records())
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
