"""Figures of the documents: one version, resumable, written between markers, and as they are recorded."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import report_all
from benchmarks.figures import measuring, rows, tables
from benchmarks.figures.drawing import draw
from benchmarks.figures.measuring import Ledger, arguments_of, measure_row, restrict_to_cores
from benchmarks.figures.rows import ROWS, Row, of_tta, supported_modes
from benchmarks.figures.tables import MarkerError, block_names, blocks_of, render, replace_blocks, with_earlier
from benchmarks.figures.version import ROOT, VersionError, code_version, is_clean
from benchmarks.lab.measures import summarize
from benchmarks.lab.spec import write_json
from benchmarks.report_all import RECORDED, main, pages
from tests.tools.lab_runs import some_records, spec_of

VERSION_LINE = re.compile(r"^Version `([^`]+)`", re.MULTILINE)


def tta_result() -> dict[str, Any]:
    summary = summarize(spec_of(), 0.9, some_records())
    return {**summary, "spec": {"seeds": [0, 1]}}


def document(**changes: Any) -> dict[str, Any]:
    """A record of two rows, as `report_all` makes it."""
    common = {"state": "measured", "cores": 2, "at": "2026-01-01T00:00:00+00:00", "took_s": 1.0, "status": 0}
    made = {
        "schema": 1, "version": "abc1234567", "quick": False, "date": "2026-01-01",
        "rows": {
            "one-slow": {**common, "command": "x", "figures": of_tta(tta_result())},
            "overhead-2": {**common, "command": "y", "figures": {"ranks": 2, "ratio": 1.0123, "folds": 0}},
            "rotating": {"state": "skipped", "reason": "no time"},
        },
    }  # fmt: skip
    return {**made, **changes}


class TestCatalogue:
    def test_names_are_unique_and_parts_known(self) -> None:
        assert len({row.name for row in ROWS}) == len(ROWS)
        assert {row.part for row in ROWS} <= set(tables.PARTS)

    @pytest.mark.parametrize("row", [row for row in ROWS if row.module == rows.TTA], ids=lambda row: row.name)
    @pytest.mark.parametrize("quick", [False, True])
    def test_training_rows_have_command_lines_that_hold(self, row: Row, quick: bool, tmp_path: Path) -> None:
        from benchmarks.lab.options import make_parser

        arguments = arguments_of(row, Ledger(tmp_path, "v", quick), quick)
        args = make_parser().parse_args(arguments)
        assert args.scenario in row.name or row.name in ("conv", "transformer")
        assert args.seeds == 1 or not quick
        if row.trace_seed is not None:
            assert args.trace.is_file()

    def test_modes_of_another_version_are_left_out(self) -> None:
        assert supported_modes(("partial(3)", "sync(sideways)", "asgd")) == ("partial(3)", "asgd")

    def test_what_a_version_lacks_is_said(self) -> None:
        lacking = Row(name="x", part="costs", module="benchmarks.nowhere", pick=dict)
        assert lacking.missing() == "this version has no benchmarks.nowhere"
        assert "no mode sync(sideways)" in str(
            Row(name="x", part="costs", module=rows.TTA, pick=dict, mode="sync(sideways)").missing()
        )


class TestMeasuring:
    """A benchmark that only writes what it is asked to."""

    @pytest.fixture
    def calls(self, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
        calls: list[list[str]] = []

        def run(arguments: Sequence[str]) -> int:
            calls.append(list(arguments))
            os.environ["OF_A_ROW"] = "1"
            sys.stdout.write("measuring\n")
            if "--raise" in arguments:
                raise RuntimeError("it broke")
            if "--killed" in arguments:
                raise SystemExit(128 + 15)
            if "--skip" in arguments:
                sys.stderr.write("skipped: no such machine\n    (the log)\n")
                return 77
            write_json(Path(arguments[-1]), {"ratio": len(calls), "rest": [1]})
            return 0

        module = types.ModuleType("benchmarks.made_up")
        module.main = run  # type: ignore[attr-defined]
        module.__spec__ = types.SimpleNamespace()  # type: ignore[assignment]
        monkeypatch.setitem(sys.modules, "benchmarks.made_up", module)
        return calls

    def row(self, name: str, *options: str, **changes: Any) -> Row:
        pick = rows.keys("ratio", "absent")
        return Row(name=name, part="costs", module="benchmarks.made_up", options=options, pick=pick, **changes)

    def test_figures_with_cores_and_command(self, calls: list[list[str]], tmp_path: Path) -> None:
        ledger = Ledger(tmp_path, "v1", quick=False)
        entry = measure_row(self.row("a", "--slow", quick=("--fast",)), ledger, quick=False)
        assert entry["state"] == "measured" and entry["figures"] == {"ratio": 1}
        assert entry["cores"] >= 1 and entry["command"] == "python -m benchmarks.made_up --slow"
        assert (tmp_path / "a.log").read_text() == "measuring\n"
        measure_row(self.row("b", quick=("--fast",)), ledger, quick=True)
        assert "--fast" in calls[1] and "OF_A_ROW" not in os.environ

    def test_what_is_measured_of_this_version_is_kept(self, calls: list[list[str]], tmp_path: Path) -> None:
        measure_row(self.row("a"), Ledger(tmp_path, "v1", quick=False), quick=False)
        assert Ledger(tmp_path, "v1", quick=False).has("a")
        assert not Ledger(tmp_path, "v2", quick=False).has("a")
        assert not Ledger(tmp_path, "v1", quick=True).has("a")

    def test_a_failure_ends_its_row_only(self, calls: list[list[str]], tmp_path: Path) -> None:
        ledger = Ledger(tmp_path, "v1", quick=False)
        measure_row(self.row("a"), ledger, quick=False)
        entry = measure_row(self.row("a", "--raise"), ledger, quick=False)  # Not the file of before.
        assert (entry["state"], entry["reason"]) == ("failed", "RuntimeError: it broke")
        assert measure_row(self.row("b", "--skip"), ledger, quick=False)["state"] == "skipped"
        assert ledger.rows["b"]["reason"] == "skipped: no such machine"
        assert not ledger.has("a") and not ledger.has("b")

    def test_a_signal_ends_the_whole_run(self, calls: list[list[str]], tmp_path: Path) -> None:
        ledger = Ledger(tmp_path, "v1", quick=False)
        with pytest.raises(SystemExit):
            measure_row(self.row("a", "--killed"), ledger, quick=False)
        assert "a" not in ledger.rows, "it is measured by the next run"

    def test_rows_of_results_wait_for_them(self, calls: list[list[str]], tmp_path: Path) -> None:
        ledger = Ledger(tmp_path, "v1", quick=False)
        assert measure_row(self.row("c", results_of=("a",)), ledger, quick=False)["reason"] == "needs a"
        measure_row(self.row("a"), ledger, quick=False)
        measure_row(self.row("c", results_of=("a",)), ledger, quick=False)
        assert calls[-1][0] == str(tmp_path / "a.json")

    def test_the_command_goes_on_where_it_was_interrupted(
        self, calls: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:  # fmt: skip
        made = (self.row("overhead-2"), self.row("overhead-4", "--raise"))
        monkeypatch.setattr(report_all, "ROWS", made)
        monkeypatch.setattr(report_all, "code_version", lambda: "abc")
        assert main(["--out", str(tmp_path)]) == 1
        assert "overhead-4: failed" in capsys.readouterr().out
        monkeypatch.setattr(report_all, "ROWS", (made[0], self.row("overhead-4")))
        assert main(["--out", str(tmp_path)]) == 0
        assert len(calls) == 3, "a row was measured twice"
        assert main(["--out", str(tmp_path), "--again"]) == 0
        assert len(calls) == 5
        table = (tmp_path / "abc" / "figures.md").read_text()
        assert "| `overhead-2` |" in table and VERSION_LINE.findall(table) == ["abc"]

    def test_a_row_during_which_the_code_changed_is_taken_back(
        self, calls: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:  # fmt: skip
        versions = iter(["abc", "abc", "abd"])
        monkeypatch.setattr(report_all, "ROWS", (self.row("overhead-2"), self.row("overhead-4")))
        monkeypatch.setattr(report_all, "code_version", lambda: next(versions))
        assert main(["--out", str(tmp_path)]) == 1
        assert "the code changed while overhead-4 was measured" in capsys.readouterr().err
        left = Ledger(tmp_path / "abc", "abc", quick=False)
        assert left.has("overhead-2") and not left.has("overhead-4")

    def test_recording_writes_the_record_and_the_documents(
        self, calls: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        page, record = tmp_path / "README.md", tmp_path / "figures.json"
        page.write_text("<!-- figures: begin costs -->\n<!-- figures: end costs -->\n")
        monkeypatch.setattr(report_all, "ROWS", (self.row("overhead-2"),))
        monkeypatch.setattr(report_all, "code_version", lambda: "abc")
        monkeypatch.setattr(report_all, "RECORDED", record)
        monkeypatch.setattr(report_all, "pages", lambda: [page])
        assert main(["--out", str(tmp_path / "out"), "--record"]) == 0
        recorded = json.loads(record.read_text())
        assert recorded["version"] == "abc" and recorded["rows"]["overhead-2"]["figures"] == {"ratio": 1}
        assert blocks_of(page.read_text()) == {"costs": render("costs", recorded)}
        monkeypatch.setattr(report_all, "code_version", lambda: "abc+12345678")
        assert main(["--out", str(tmp_path / "out"), "--record"]) == 2  # Not of a commit.

    def test_cores_are_those_there_are(self, monkeypatch: pytest.MonkeyPatch) -> None:
        chosen: list[Any] = []
        monkeypatch.setattr(measuring.os, "sched_getaffinity", lambda _: {4, 2, 7})
        monkeypatch.setattr(measuring.os, "sched_setaffinity", lambda _, cores: chosen.append(cores))
        restrict_to_cores(2)
        assert chosen == [[2, 4]]
        with pytest.raises(ValueError, match="expected 1 to 3"):
            restrict_to_cores(4)

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["--only", "sideways"], "--only has sideways"),
            (["--record", "--quick"], "--record takes figures of a whole run"),
            (["--cores", "0"], "--cores is 0"),
        ],
    )
    def test_bad_options(self, words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(words) == 2
        assert message in capsys.readouterr().err


class TestTables:
    def test_every_table_has_version_cores_and_date(self) -> None:
        for part in (*tables.PARTS, "all"):
            text = render(part, document())
            assert VERSION_LINE.findall(text) == ["abc1234567"] and "2026-01-01" in text
        head, _, line = render("scenarios", document()).splitlines()[:3]
        assert head.startswith("| row | scenario | ranks |") and f"| {tta_result()['cores']} |" in line
        assert "| `DistributedSampler`, `hvd.shard` |" in line
        assert "2.71" not in line and "0.40" in line and "1.08" in line  # `star_hvd`: ratio and bound_ratio.

    def test_rows_of_earlier_versions_stay_below_and_are_named(self) -> None:
        new = document(version="b", rows={"one-slow": document()["rows"]["one-slow"]})
        former = document(version="a", earlier=[{**document(version="0"), "rows": document()["rows"]}])
        found = with_earlier(new, former)
        assert [(each["version"], list(each["rows"])) for each in found["earlier"]] == [("a", ["overhead-2"])]
        assert with_earlier(new, found) == found and with_earlier(former, found)["earlier"] == []
        text = render("all", found)
        present, _, earlier = text.partition("### Of version `a`")
        assert "`one-slow`" in present and "`overhead-2` (an earlier version was)" in present
        assert "| `overhead-2` |" in earlier and "`one-slow`" not in earlier and "Version `a`" in earlier
        assert "overhead-2" not in render("scenarios", found) and "Version `a`" not in render("costs", found)

    def test_what_is_the_same_in_all_rows_is_said_once(self) -> None:
        made = document()
        other = {**made["rows"]["one-slow"], "figures": {**made["rows"]["one-slow"]["figures"], "scenario": "two-slow"}}
        made["rows"] |= {"two-slow": other}
        text = render("scenarios", made)
        head, _, one, two = text.splitlines()[:4]
        assert head.startswith("| row | scenario | none slow | plain Horovod | `star_hvd` | ratio | bound_ratio |")
        assert "| `one-slow` |" in one and "| `two-slow` |" in two and "cores" not in head
        cores = tta_result()["cores"]
        assert f"cores {cores}; fed (Horovod, `star_hvd`) `DistributedSampler`, `hvd.shard`; to" in text

    def test_deaths_show_what_they_cost(self) -> None:
        killed = {**tta_result(), "killed": 2, "recovery_s": 1.234, "rebuild_s": None, "lost_steps": 3}
        made = document()
        made["rows"] = {"killed-server": {**made["rows"]["one-slow"], "figures": of_tta(killed)}}
        assert "| 2 | 1.23 s | - | 3 | - |" in render("faults", made)
        named = re.findall(r"`(\w+)`", render("faults", made).splitlines()[2].rpartition(" kB, ")[2].partition("|")[0])
        assert named == ["drop", "star"], "those whose deaths are counted"
        several = {"plain": 1, "star": 0, "ps(2)": 2}
        for failed, shown in (({"plain": 0, "ps(2)": 0}, "0"), (several, "`plain` 1, `ps(2)` 2")):
            made["rows"]["killed-server"]["figures"] = of_tta({**killed, "failed_attempts": failed})
            assert f"| 2 | 1.23 s | - | 3 | {shown} |" in render("faults", made)

    def test_what_is_missing_is_named(self) -> None:
        assert "`rotating` (no time)" in render("scenarios", document())
        assert "`decision` (not run)" in render("decisions", document())

    def test_missing_times_are_no_numbers(self) -> None:
        made = document()
        star = made["rows"]["one-slow"]["figures"]["trained"]["star"]
        star.update(seconds=None, ratio=None, bound_ratio=None)
        assert "not reached" in render("scenarios", made)

    def test_pages_are_written_between_their_markers(self, tmp_path: Path) -> None:
        page = tmp_path / "README.md"
        page.write_text("# A\n\n<!-- figures: begin costs -->\noutdated\n<!-- figures: end costs -->\n\nafter\n")
        assert replace_blocks(page, document()) and not replace_blocks(page, document())
        text = page.read_text()
        assert text.startswith("# A\n") and text.endswith("\nafter\n") and "outdated" not in text
        assert blocks_of(text) == {"costs": render("costs", document())}
        assert replace_blocks(page, document(version="other"))
        assert VERSION_LINE.findall(page.read_text()) == ["other"]

    @pytest.mark.parametrize(
        "text",
        [
            "<!-- figures: begin costs -->",
            "<!-- figures: end costs -->",
            "<!-- figures: begin costs -->\n<!-- figures: end exact -->",
            "<!-- figures: begin costs -->\n<!-- figures: begin exact -->",
            "<!-- figures: begin sideways -->\n<!-- figures: end sideways -->",
        ],
    )
    def test_bad_markers(self, text: str) -> None:
        with pytest.raises(MarkerError, match="marker"):
            block_names(text)

    def test_a_plot_is_drawn_where_there_is_something_to_draw(self, tmp_path: Path) -> None:
        assert draw(document(), tmp_path / "f.png") and (tmp_path / "f.png").stat().st_size > 1000
        assert not draw(document(rows={}), tmp_path / "g.png")


class TestVersion:
    def test_it_is_the_code_s_and_not_the_figures(self, tmp_path: Path) -> None:
        def git(*words: str) -> None:
            command = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", *words]
            subprocess.run(command, check=True, capture_output=True)

        with pytest.raises(VersionError, match="git log failed"):
            code_version(tmp_path)
        (tmp_path / "benchmarks").mkdir()
        (tmp_path / "benchmarks" / "a.py").write_text("1\n")
        git("init")
        git("add", ".")
        git("commit", "-m", "first")
        first = code_version(tmp_path)
        assert is_clean(first)
        (tmp_path / "README.md").write_text("x")
        (tmp_path / "benchmarks" / "figures.json").write_text("{}")
        git("add", ".")
        git("commit", "-m", "figures")
        assert code_version(tmp_path) == first
        (tmp_path / "benchmarks" / "b.py").write_text("2\n")
        changed = code_version(tmp_path)
        assert changed.startswith(f"{first}+") and not is_clean(changed)
        (tmp_path / "benchmarks" / "b.py").write_text("3\n")
        assert code_version(tmp_path) not in (first, changed)


class TestDocuments:
    def test_the_documents_have_places_for_figures(self) -> None:
        assert ROOT / "README.md" in pages()

    def test_figures_in_the_documents_are_those_recorded_and_of_one_version(self) -> None:
        """Else: `python -m benchmarks.report_all --record`, or leave what stands between the markers alone."""
        if not RECORDED.is_file():
            pytest.skip("no figures are recorded")
        recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
        assert not recorded["quick"] and is_clean(recorded["version"])
        for page in pages():
            for name, text in blocks_of(page.read_text(encoding="utf-8")).items():
                assert text == render(name, recorded), f"{page.name}: {name}"
                former = [each["version"] for each in recorded.get("earlier", ())] if name == "all" else []
                assert VERSION_LINE.findall(text) == [recorded["version"], *former], f"{page.name}: {name}"
