"""The laboratory with real jobs of two ranks, as short as they can be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.overhead import main as overhead
from benchmarks.tta import main as tta

pytestmark = pytest.mark.slow
DEADLINE = ("--deadline-s=900", "--stall-s=600")


def test_ranks_with_loading_workers_train_a_real_network(tmp_path: Path) -> None:
    out = tmp_path / "tta.json"
    words = ["--scenario=slow-input", "--ranks=2", "--network=conv", "--train-samples=128", "--seeds=1", "--epochs=1"]
    words += ["--device-ms=2", "--input-ms-per-sample=0.5", "--workers=1", "--variants=plain,star", "--modes=sync"]
    assert tta([*words, *DEADLINE, "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    runs = {name: one["seeds"][0] for name, one in found["variants"].items()}
    runs["sync"] = found["modes"]["sync"]["per_seed"][0]
    for name in ("plain", "sync"):  # `auto` may choose other batches.
        assert sum(runs[name]["rank_batches"]) == 8, f"{name}: 128 samples are 8 batches of 16"
    assert all(run["epoch_losses"][0] > 0.0 for run in runs.values())
    assert runs["sync"]["max_staleness"] == 0 and runs["sync"]["drops"] == 0
    assert found["variants"]["plain"]["feeding"] == "sampler"
    assert found["modes"]["sync"]["feeding"] == "shard"
    assert 0.9e6 < found["model_bytes"] < 1.1e6 and found["cores"] >= 1


def test_star_hvd_trains_on_equal_shares_too(tmp_path: Path) -> None:
    out = tmp_path / "tta.json"
    words = ["--scenario=one-slow", "--ranks=2", "--train-samples=128", "--seeds=1", "--epochs=2", "--device-ms=2"]
    assert tta([*words, "--variants=star", "--feeding=sampler", *DEADLINE, "--json", str(out)]) == 0
    (run,) = json.loads(out.read_text())["variants"]["star"]["seeds"]
    assert run["rank_batches"] == [8, 8] and run["max_staleness"] >= 0


def test_overhead_with_loaders_counts_whole_epochs(tmp_path: Path) -> None:
    out = tmp_path / "overhead.json"
    words = ["--ranks=2", "--feed=loader", "--workers=1", "--input-ms-per-sample=0.2", "--blocks=2", "--steps=3"]
    assert overhead([*words, "--device-ms=2", "--mode=sync", "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert [len(block) for side in found["blocks_s"].values() for block in side] == [3] * 4
    assert found["folds"] == 0 and found["feed"] == "loader" and found["workers"] == 1
