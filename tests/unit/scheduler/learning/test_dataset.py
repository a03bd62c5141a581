"""The table: written and read alike, checked, and never split inside a network."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from scheduler.cost.conditions import Conditions
from scheduler.learning import dataset
from scheduler.learning.features import FEATURES, rows
from scheduler.learning.simulated_rows import collect_scenario, fork, in_order, moment_rows
from scheduler.plan.plan import Plan
from scheduler.simulator import Cluster, Episode, Job, Network, Scenario
from tests.support.learning import small_table


def test_what_is_written_is_read(tmp_path: Path) -> None:
    described = dataset.write(tmp_path / "t.csv.gz", small_table(), made_by="me")
    frame, again = dataset.read(tmp_path / "t.csv.gz")
    assert again == described and described["networks"] == 12 and described["sources"] == {"simulated": len(frame)}
    assert np.allclose(dataset.matrix(frame), dataset.matrix(small_table()), rtol=1e-4)
    assert frame["network"].tolist() == small_table()["network"].tolist()


def test_equal_rows_give_equal_files(tmp_path: Path) -> None:
    one = dataset.write(tmp_path / "a.csv.gz", small_table())
    two = dataset.write(tmp_path / "b.csv.gz", small_table())
    assert one["sha256"] == two["sha256"]


def test_damaged_or_other_tables_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.csv.gz"
    with pytest.raises(dataset.DatasetError, match="star-scheduler collect"):
        dataset.read(path)
    dataset.write(path, small_table())
    about = json.loads((tmp_path / "t.json").read_text())
    (tmp_path / "t.json").write_text(json.dumps({**about, "feature_version": 99}))
    with pytest.raises(dataset.DatasetError, match="feature_version 99"):
        dataset.read(path)
    (tmp_path / "t.json").write_text(json.dumps(about))
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(dataset.DatasetError, match="SHA-256"):
        dataset.read(path)
    path.write_bytes(gzip.compress(b"a,b\n1,2\n"))
    with pytest.raises(dataset.DatasetError, match="SHA-256"):
        dataset.read(path)
    with pytest.raises(dataset.DatasetError, match="csv.gz"):
        dataset.write(tmp_path / "t.txt", small_table())
    with pytest.raises(dataset.DatasetError, match="columns"):
        dataset.write(path, small_table().drop(columns=["seed"]))


def test_no_network_is_in_two_folds() -> None:
    frame = small_table()
    fold = dataset.folds(frame, 4)
    assert len(set(fold.tolist())) > 1
    for _, index in frame.groupby("network").indices.items():
        assert len(set(fold[index].tolist())) == 1
    assert (dataset.folds(frame.iloc[::-1], 4) == fold[::-1]).all()


# ---- moments --------------------------------------------------------------------------------------------------------


def slow_job(factor: float = 4.0, end_s: float = 1e6) -> Job:
    episodes = (Episode(rank=1, kind="compute", start_s=0.0, end_s=end_s, factor=factor),)
    network = Network(compute_s=0.1, comm_bytes=1000, target_steps=1e5)
    return Job(Scenario(cluster=Cluster(world_size=4), network=network, episodes=episodes))


def test_a_fork_finds_what_leaving_out_the_slow_rank_brings() -> None:
    job = slow_job()
    job.advance(8)
    before = (job.now_s, job.steps, float(job.state.account.progress[0]))
    log_relative, reached = fork(job, [Plan.sync(4), Plan.partial(4, 3), Plan.ps(4, 3), Plan.local(4, steps=4)])
    assert (job.now_s, job.steps, float(job.state.account.progress[0])) == before
    assert log_relative[0] == 0.0
    assert np.log(1 / 4) < log_relative[1] < np.log(1 / 2)
    assert 0.0 < log_relative[3] < 0.5, "waits for the slow rank as well, and drifts apart"
    assert ((reached >= 0.0) & (reached <= 1.0)).all()


def test_a_disturbance_that_ends_is_worth_less_than_one_that_lasts() -> None:
    lasting, short = slow_job(), slow_job(end_s=5.0)
    for job in (lasting, short):
        job.advance(8)
    plans = [Plan.sync(4), Plan.partial(4, 3)]
    assert fork(short, plans)[0][1] > fork(lasting, plans)[0][1] + 0.3


def test_every_mode_can_be_tried_from_every_other() -> None:
    """Modes of servers and groups keep their queues as objects; a fork must not depend on them."""
    plans = [Plan.sync(4), Plan.partial(4, 3), Plan.subgroup(4, [0, 2, 3]), Plan.grouped(4, 2), Plan.ps(4, 1),
             Plan.ps(4, 1, rule="groups", groups=((0, 2, 3), (1,))), Plan.local(4, steps=4)]
    for start in plans:
        job = slow_job()
        job = Job(job.scenario, plan=start)
        job.advance(12)
        before = job.now_s
        log_relative, _ = fork(job, plans, steps=8)
        assert np.isfinite(log_relative).all() and job.now_s == before, start.label


def test_features_of_candidates_do_not_depend_on_plans_that_a_decision_does_not_have() -> None:
    job = slow_job()
    job.advance(12)
    window, active = job.window(), Plan.sync(4)
    conditions = Conditions.from_window(window)
    assert conditions is not None
    offered, more = [Plan.sync(4), Plan.local(4, steps=4)], [Plan.partial(4, 3), Plan.partial(4, 2)]
    found = moment_rows(offered, more, conditions, window, active)
    live = rows(offered, conditions, window, active, in_order(offered, conditions))
    assert found.shape == (4, len(FEATURES)) and (found[:2] == live).all()
    assert found[:, FEATURES.index("offered")].tolist() == [2.0, 2.0, 3.0, 3.0]
    assert found[0, FEATURES.index("best_log")] > found[2, FEATURES.index("best_log")], "partial(3) is faster"
    assert (found[:, FEATURES.index("cost_gap_log")] >= 0.0).all()


@pytest.mark.slow
def test_a_scenario_gives_rows_of_the_table() -> None:
    scenario, moments = collect_scenario(4, moments=1)
    assert len(moments) == 1 and moments[0].plans[0].mode == "sync"
    table = dataset.records(scenario, moments, "1")
    assert len(table) == len(moments[0].plans) and {len(row) for row in table} == {len(dataset.columns())}
    assert moments[0].features.shape == (len(table), len(FEATURES))
    again = collect_scenario(4, moments=1)[1][0]
    assert (again.log_relative == moments[0].log_relative).all() and (again.features == moments[0].features).all()
