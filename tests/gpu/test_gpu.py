"""All modes on a real device. Skipped, with the reason, where there is none; see `job.py` for what the ranks run.

Several ranks share a GPU: under NCCL each counts as a host of its own.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests.gpu.job import LR
from tests.support.launch import JobResult, run_job

RANKS = 4
POISON = tuple(
    f"poison:{mode}:{kind}"
    for mode, kind in (
        ("sync", "sgd"),
        ("partial(3)", "sgd"),
        ("partial(2)", "momentum"),
        ("subgroup(0,1,2)", "sgd"),
        ("grouped(2)", "sgd"),
        ("local(4)", "sgd"),
        ("ps(4)", "sgd"),
        ("ps(2)", "momentum"),
        ("ps(1)", "sgd"),
        ("local(4)", "background"),
        ("subgroup(0,1,2)", "background"),
        ("ps(4)", "background"),
        ("auto", "sgd"),
    )
)
SWITCHING = ("switching:1", "switching:2", "switching:3")
EXACT = (
    "steal",
    "out_of_memory",
    "lossy:fp16",
    "lossy:low rank",
    "amp:float16",
    "amp:bfloat16",
    "channels_last:plain",
    "channels_last:fused",
    "two_streams",
)
EQUAL = ("equal:sgd", "equal:adamw", "equal:fused", "equal:capturable")
FETCHED = ("fetched:plain", "fetched:fused", "fetched:capturable")
OTHER = ("default_device:sync", "default_device:partial(3)", "no_wait:none", "no_wait:zeros")


def missing() -> str | None:
    """Why these tests cannot run here, None where they can."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA device on this machine"
    from horovod.torch import mpi_ops

    if not mpi_ops.nccl_built() and not mpi_ops.gloo_built():
        return "Horovod was built with neither NCCL nor Gloo"
    if not mpi_ops.cuda_built():
        return "Horovod was built without CUDA: build it again where the CUDA toolkit is (scripts/build_horovod.py)"
    return None


REASON = missing()
pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]


@functools.cache
def _job(names: tuple[str, ...]) -> JobResult:
    env = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    program = "tests.gpu.exact" if names == EXACT else "tests.gpu.job"
    # In interpreters of their own: CUDA does not work in a fork of a process that has looked for devices.
    return run_job(program, *names, ranks=RANKS, env=env, timeout_s=1100.0, fresh=True)


def facts_of(names: tuple[str, ...], name: str) -> list[dict[str, Any]]:
    job = _job(names)
    facts = [result.get("facts", {}).get(name) for result in job.results]
    assert all(facts), f"the job ended during {[r.get('running') for r in job.results]}:\n{job.tail}"
    return facts  # type: ignore[return-value]


def check_replicas(facts: list[dict[str, Any]]) -> None:
    assert len({rank["digest"] for rank in facts}) == 1, "replicas differ"


def check_poison(facts: list[dict[str, Any]], rounding: float = 0.0) -> None:
    """No bucket's NaN came anywhere, and all elements of all parameters went the same way.

    Args:
        facts: Of all ranks.
        rounding: How far elements may differ: a mean of unequal numbers is summed in another order in each part of a
            ring.
    """
    check_replicas(facts)
    for rank in facts:
        assert not rank["nan"], "a gradient was read before the device had written it"
        assert rank["spread"] <= rounding, "a gradient was torn"
        assert rank["stats"]["mismatches"] == 0 and rank["stats"]["pending_weight"] == 0


@pytest.mark.parametrize("name", POISON)
def test_no_poison_in_any_mode(name: str) -> None:
    facts = facts_of(POISON, name)
    _, mode, kind = name.split(":")
    check_poison(facts, rounding=LR / 100.0 if mode == "auto" else 0.0)
    assert mode == "auto" or {rank["mode"] for rank in facts} == {mode}, "the mode never came into force"
    # Servers divide an update of fewer gradients by their number: only where all means are 1 the value is known.
    if kind == "sgd" and mode.startswith(("sync", "partial", "subgroup")):
        for rank in facts:
            assert rank["value"] == -LR * rank["stats"]["steps"], "some mean was not 1"


@pytest.mark.parametrize("name", POISON[:3])
def test_compute_time_is_the_device_s(name: str) -> None:
    for rank in facts_of(POISON, name):
        assert rank["told_ms"] > 0.8 * rank["device_ms"], "kernels were launched, not finished, when the clock stopped"


@pytest.mark.parametrize("name", SWITCHING)
def test_no_poison_in_random_switches(name: str) -> None:
    facts = facts_of(SWITCHING, name)
    check_poison(facts, rounding=LR / 100.0)
    assert len({mode.partition("(")[0] for mode in facts[0]["seen"]}) >= 3, f"only {facts[0]['seen']}"


@pytest.mark.parametrize("name", EQUAL)
def test_sync_is_as_near_to_plain_horovod_as_that_is_to_itself(name: str) -> None:
    facts = facts_of(EQUAL, name)
    check_replicas(facts)
    for rank in facts:
        assert rank["star"] <= max(1e-5, 10.0 * rank["again"])


@pytest.mark.parametrize("name", FETCHED)
def test_a_fetched_state_is_where_the_optimizer_wants_it(name: str) -> None:
    facts = facts_of(FETCHED, name)
    check_replicas(facts)
    where = "cpu" if name.endswith("plain") else "cuda"
    assert any(rank["stats"]["fetched"] > 0 for rank in facts), "no rank was ever behind"
    for rank in facts:
        assert not rank["nan"]
        assert rank["places"] == ["exp_avg:cuda", "exp_avg_sq:cuda", f"step:{where}"]


@pytest.mark.parametrize("name", OTHER[:2])
def test_defaults_of_the_user_s_do_not_reach_what_is_the_host_s(name: str) -> None:
    check_replicas(facts_of(OTHER, name))


@pytest.mark.parametrize("name", OTHER[2:])
def test_backward_does_not_wait_for_the_device(name: str) -> None:
    for rank in facts_of(OTHER, name):
        assert rank["waits"] == [], "the host waited for the device within backward"
        assert rank["backward_ms"] < 0.5 * rank["device_ms"]


# ---- exact modes --------------------------------------------------------------------------------------------------


def exact_facts(name: str) -> list[dict[str, Any]]:
    facts = facts_of(EXACT, name)
    check_replicas(facts)
    assert not any(rank["nan"] for rank in facts), "something was read before the device had written it"
    return facts


def test_micro_batches_are_taken_over_from_a_rank_whose_device_is_slow() -> None:
    facts = exact_facts("steal")
    for rank in facts:
        assert rank["value"] == -LR * rank["steps"], "some mean was not 1"
    assert facts[0]["samples"] < 0.8 * min(rank["samples"] for rank in facts[1:]), "a slow rank began all its passes"
    assert sum(rank["samples"] for rank in facts) == facts[0]["of_all"]


def test_a_batch_that_does_not_fit_the_device_is_repeated_in_parts() -> None:
    facts = exact_facts("out_of_memory")
    for rank in facts:
        assert rank["value"] == -LR * rank["steps"], "some mean was not 1"
    assert facts[0]["failed"] == 0 and facts[1]["failed"] == 1, "once: later batches are cut before they fail"
    assert facts[1]["largest_part"] < facts[0]["largest_part"] <= 2 * facts[1]["largest_part"] + 1, "in two parts"


@pytest.mark.parametrize("name", EXACT[2:4])
def test_a_network_learns_with_lossy_gradients(name: str) -> None:
    for rank in exact_facts(name):
        assert rank["used"] and rank["last"] < 0.5 * rank["first"]


@pytest.mark.parametrize("name", EXACT[4:8])
def test_mixed_precision_and_memory_formats_are_as_near_to_plain_horovod_as_that_is_to_itself(name: str) -> None:
    # What autocast rounds can flip with another order of summation; a gradient in another format than its parameter,
    # or one that is still scaled, shows in the first digit.
    limit = 1e-3 if name.startswith("amp") else 1e-4
    for rank in exact_facts(name):
        assert rank["star"] <= max(limit, 10.0 * rank["again"])


def test_parts_of_a_model_on_streams_of_their_own() -> None:
    for rank in exact_facts("two_streams"):
        assert rank["value"] == -LR * rank["steps"], "some mean was not 1"
