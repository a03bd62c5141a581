"""What every rank of a contract job runs: all cases of its world size, one after another.

Outcomes are written after every case, so that a case that hangs or ends the job is known by name.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import sys
import time
import traceback
from typing import Any

import torch

import star_hvd
from star_hvd.runtime import runtime
from tests.contract import (
    cases_api,
    cases_features,
    cases_gradients,
    cases_programs,
    cases_ranks,
    cases_scaler,
    cases_state,
    cases_step,
    cases_values,
)
from tests.contract.harness import CASES, Api, Context
from tests.support.launch import write_result
from tests.support.patient import wait_without_spinning
from tests.support.plain import horovod

__all__ = ["case_ids"]

NUMBERS = (cases_values, cases_gradients)
MODULES = (*NUMBERS, cases_api, cases_step, cases_scaler, cases_features, cases_state, cases_ranks, cases_programs)
CASE_LIMIT_S = 240.0  # Of a case that hangs, on a busy machine.
OVERLAP = "overlap"  # Stands for `sync` with `overlap=True`.
OVERLAPPED = (
    "sgd_with_momentum", "adam", "op_sum", "fp16_compression", "passes_are_summed", "step_before_all_passes",
    "uneven_batches_are_weighted", "parameters_without_gradient_on_one_rank", "frozen_parameters",
    "a_parameter_used_twice", "float32_and_float64", "one_cycle_scheduler_moves_momentum_too",
    "gradients_cleared_by_the_model", "a_synchronized_step_that_is_not_applied",
    "load_state_dict_in_the_middle_of_a_step", "state_made_before_wrapping_is_kept",
    "a_checkpoint_restored_on_rank_0_only", "elastic_state_syncs_from_rank_0",
    "state_dict_survives_every_way_of_saving", "two_optimizers_in_turn", "training_in_another_thread",
    "evaluation_in_inference_mode", "autocast_bfloat16", "fused_and_foreach_steps",
)  # fmt: skip
"""Cases that two ranks also run with `overlap=True`; first, since nothing overlaps after `torch.compile` was used.

Their number is a multiple of `RENEWED_EVERY`: under plain Horovod `a_collective_within_backward_stays_in_sync` hangs if
it does not meet the runtime that it meets without them, as Horovod's names of unnamed operations then differ.
"""
RENEWED_EVERY = 6  # Cases; those that follow take longer the more optimizers were left before them.


def case_ids(ranks: int) -> list[str]:
    """Names of the cases for a world size, `name[mode]`, in the order in which they run."""
    items = sorted((item for item in CASES.values() if ranks in item.ranks), key=lambda item: item.last)
    # Four ranks share the cores of a small machine: there the second mode is left to the cases about numbers.
    return [f"{name}[{OVERLAP}]" for name in OVERLAPPED if ranks == 2] + [
        f"{item.name}[{mode}]"
        for item in items
        for mode in item.modes
        if ranks < 4 or mode == "sync" or item.function.__module__ in [each.__name__ for each in NUMBERS]
    ]


def _context(mode: str, subset: Any) -> Context:
    size = int(horovod.size())
    options = {"mode": f"partial({size})"} if mode == "partial" else {"mode": "sync", "overlap": mode == OVERLAP}
    return Context(int(horovod.rank()), size, Api(horovod, {}), Api(star_hvd, options), subset)


def _run_case(case_id: str, subset: Any) -> str:
    """Empty, or the traceback."""
    name, mode = case_id.rstrip("]").split("[")
    try:
        CASES[name].function(_context(mode, subset))
    except Exception:
        return traceback.format_exc()
    return ""


def main(wanted: list[str]) -> None:
    torch.set_num_threads(1)
    wait_without_spinning()
    faulthandler.enable()
    # torch imports its compiler with a process's first optimizer. Every new optimizer collects garbage: looking through
    # what was imported would take longer than the case.
    importlib.import_module("torch._dynamo")
    gc.collect()
    gc.freeze()
    # Two ranks know a set with one of them, four a set with two.
    ranks_of_subset = list(range(max(1, _size_from_launcher() // 2)))
    subset = horovod.ProcessSet(ranks_of_subset)
    star_hvd.init(process_sets=[subset] if _size_from_launcher() > 1 else None)
    outcomes: dict[str, str] = {}
    seconds: dict[str, float] = {}
    for number, case_id in enumerate(wanted or case_ids(int(horovod.size()))):
        if number % RENEWED_EVERY == RENEWED_EVERY - 1:
            runtime.shutdown()  # Every optimizer keeps a thread, and rank 0 watches over all of them.
        write_result({"outcomes": outcomes, "running": case_id, "seconds": seconds})
        faulthandler.dump_traceback_later(CASE_LIMIT_S, exit=True)
        began_s = time.monotonic()
        outcomes[case_id] = _run_case(case_id, subset)
        seconds[case_id] = round(time.monotonic() - began_s, 3)
        write_result({"outcomes": outcomes, "running": "", "seconds": seconds})
        horovod.barrier()
    faulthandler.cancel_dump_traceback_later()
    star_hvd.shutdown()


def _size_from_launcher() -> int:
    return int(os.environ.get("HOROVOD_SIZE", "1"))


if __name__ == "__main__":
    main(sys.argv[1:])
