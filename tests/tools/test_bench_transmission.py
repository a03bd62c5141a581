"""The benchmark of communication on slow links: its figures, without a link."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import transmission
from benchmarks.figures.rows import LINK_FIGURES
from benchmarks.lab.launch import JobFailed
from benchmarks.machine.netns import NetworkError
from benchmarks.transmission import CELLS, bound_s, figures, link_s, ps_cycle_s, ps_wire_s, push_s, variants_of
from benchmarks.workers.transmission import VARIANTS, Job, network_of


def cell(variant: str, part: float, step_s: float, ratio: float | None, mode: str = "sync") -> dict[str, Any]:
    place = {"mbytes": 1.0, "mbit": 50.0, "mode": mode, "part": part}
    return place | {"variant": variant, "step_s": step_s, "ratio": ratio, "bound": 0.9 * step_s}


def test_figures_are_those_of_their_cells() -> None:
    cells = [
        cell("horovod", 0.8, 1.0, 1.0),
        cell("overlap", 0.8, 0.8, 0.8),
        cell("overlap", 0.5, 0.7, 0.7),
        cell("overlap", 2.0, 1.5, 1.5),
        cell("overlap", 0.8, 0.9, 0.9, mode="partial(3)"),
    ]
    assert figures(cells) == {"sync_lossless": 0.8, "sync_lossless_bound": pytest.approx(0.72)}
    bound = [cell("star", 2.0, 1.0, 1.1), cell("overlap-auto", 2.0, 1.05, 1.2)]
    assert figures(bound) == {"compute_bound": pytest.approx(1.05)}
    assert figures([cell("hierarchical", 0.8, 0.7, 0.7)]) == {"hierarchical": 0.7}
    assert figures([]) == {}


@pytest.mark.parametrize(("error", "status"), [(JobFailed("it died"), 1), (NetworkError("no root"), 77)])
def test_some_cells_alone_are_no_result(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception, status: int
) -> None:
    measured = [cell("horovod", 0.8, 1.0, 1.0) | {"link_s": 0.1, "compute_s": 0.1, "exposed_comm_s": 0.1}]

    def measure(mbytes: float, *rest: Any) -> list[dict[str, Any]]:
        if mbytes > 1.0:
            raise error
        return measured

    monkeypatch.setattr(transmission, "measure", measure)
    path = tmp_path / "figures.json"
    assert transmission.main(["--mbytes=1", "--json", str(path)]) == 0 and path.is_file()
    assert transmission.main(["--mbytes=1,10", "--json", str(path)]) == status and not path.exists()
    with pytest.raises(SystemExit):
        transmission.main(["--variants=typo"])


def test_figures_of_servers_and_of_local_steps() -> None:
    def behind(mode: str, variant: str, **more: Any) -> dict[str, Any]:
        times = {"ranks": 4, "compute_s": 0.48, "push_s": 0.3, "own_step_s": 0.8, "median_step_s": 0.5} | more
        return cell(variant, 0.8, 0.0, None, mode=mode) | times

    cells = [
        behind("ps(3)", "background", step_s=0.6),
        behind("ps(3)", "background", step_s=0.5, compute_s=0.1),  # The longest is the push.
        behind("ps(3)", "star", step_s=0.9),
        behind("ps(3)", "background-auto", step_s=0.3, part=0.7),  # Nothing to compare with.
        behind("local(8)", "star", step_s=0.7),
        behind("local(8)", "background", step_s=0.51),
    ]
    found = figures(cells)
    assert found["ps_background_bound"] == pytest.approx(0.5 / 0.3)
    assert found["ps_wire_bound"] == pytest.approx(1.5), "three pushes and three answers on four links"
    assert "ps_bound" not in found, "not measured"
    usual = behind("ps(3)", "default", step_s=0.54)
    assert figures([*cells, usual]) == found | {"ps_bound": pytest.approx(0.54 / 0.48)}
    assert found["ps_least_bound"] == pytest.approx(2.0), "nothing is computed for longer than it travels"
    assert found["ps_over_cycle"] == pytest.approx(0.6 / 0.62) and "ps_auto" not in found
    assert found["local_exposed"] == pytest.approx(0.01 / 0.2)
    assert "local_exposed" not in figures(cells[-1:]), "nothing to compare with"


def test_the_least_time_of_an_update() -> None:
    assert push_s(10.0, 200.0, 4) == pytest.approx(0.3)
    assert ps_cycle_s(0.1, 0.3) == pytest.approx(0.6)
    assert ps_cycle_s(0.48, 0.3) == pytest.approx(0.62)  # The backward pass is longer than the push.
    assert ps_cycle_s(3.0, 0.3) == pytest.approx(3.0)


def test_the_least_time_of_an_update_at_any_staleness() -> None:
    assert ps_wire_s("ps(3)", 4, 0.1, 0.3) == pytest.approx(0.45)  # The links.
    assert ps_wire_s("ps(3)", 4, 2.0, 0.3) == pytest.approx(1.5)  # The computing.
    assert ps_wire_s("asgd", 4, 0.1, 0.3) == pytest.approx(0.15)
    for compute_s in (0.01, 0.3, 0.6, 3.0):
        assert ps_wire_s("ssgd", 4, compute_s, 0.3) <= ps_cycle_s(compute_s, 0.3)


def test_the_default_cells_give_every_figure() -> None:
    def made(variant: str, place: tuple[Any, ...]) -> dict[str, Any]:
        names = ("mbytes", "mbit", "part", "mode")
        times = dict.fromkeys(("step_s", "own_step_s", "median_step_s", "compute_s", "push_s", "ratio", "bound"), 1.0)
        return {"variant": variant, "ranks": 4, **times, **dict(zip(names, place[:4], strict=True))}

    found = figures([made(variant, place) for place in CELLS for variant in place[4] or variants_of(place[3])])
    asked = {"sync_lossless", "sync_auto", "sync_auto_fp16", "ps_bound", "ps_auto", "local_exposed", "compute_bound"}
    asked |= {"ps_background_bound", "ps_least_bound", "ps_wire_bound"}
    assert asked <= found.keys()
    assert set(LINK_FIGURES) <= found.keys(), "the row of the documents would be empty"


def test_compression_is_judged_where_it_can_save_most_of_a_step() -> None:
    def made(part: float, variant: str, step_s: float) -> dict[str, Any]:
        place = {"mbytes": 10.0, "mbit": 50.0, "part": part, "mode": "sync", "compute_s": part * 2.4}
        return {"variant": variant, "step_s": step_s, "ratio": step_s / (2.5 + part), "bound": None, **place}

    short = [made(0.1, "horovod", 2.6), made(0.1, "horovod-fp16", 1.3), made(0.1, "compression-auto", 0.65)]
    long = [made(0.8, "horovod", 3.2), made(0.8, "compression-auto", 2.0)]
    found = figures([*short, *long])
    assert found["sync_auto"] == pytest.approx(0.25) and found["sync_auto_fp16"] == pytest.approx(0.5)
    assert found["sync_auto_long"] == pytest.approx(2.0 / 3.3)
    assert found["sync_auto_long_bound"] == pytest.approx(0.8 * 2.4 / 3.2)
    assert figures(long)["sync_auto"] == found["sync_auto_long"]


def test_the_bound_of_a_lossless_schedule() -> None:
    assert bound_s(0.6, 0.06, 16) == 0.6  # The bytes.
    assert bound_s(0.6, 0.59, 16) == pytest.approx(0.6275)  # The first layer's gradient comes last and is needed first.
    assert bound_s(0.6, 0.0, 1) == 0.6


def test_bytes_on_the_link() -> None:
    assert link_s(10.0, 80.0, 2) == pytest.approx(1.0)
    job = Job(mbytes=1.0, compute_s=0.1, layers=16, mode="sync", steps=1, warm=1)
    assert sum(4 * param.numel() for param in network_of(job).parameters()) == pytest.approx(1e6, rel=0.02)


def test_plain_horovod_comes_first() -> None:
    assert variants_of("sync")[0] == "horovod" and "overlap" in variants_of("sync")
    assert "overlap" not in variants_of("partial(3)") and "background" not in variants_of("sync")
    assert "background" in variants_of("ps(3)") and "background" in variants_of("local(8)")
    assert "hierarchical" in variants_of("sync", 2) and "hierarchical" not in variants_of("sync")
    assert all(not variant.options or variant.ours or name == "horovod-fp16" for name, variant in VARIANTS.items())
