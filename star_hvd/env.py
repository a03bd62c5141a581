"""The environment variables with which users set how a job trains, one function each.

Others are read where they are used: `STAR_MODEL` (`runtime/model_loader.py`), `STAR_LOG_DIR`, `STAR_RUN_LOG` and
MLflow's (`run_log/layout.py`). Blanks around a value do not count.

`horovodrun` exports the environment to all ranks, so a variable set at the launcher reaches every host.
"""

from __future__ import annotations

import difflib
import functools
import logging
import os
import re

__all__ = ["KNOWN", "accuracy", "async_completion", "check_locks", "elastic", "encryption", "hierarchical", "host",
           "interface", "least_quorum", "mode", "neighbours_folder", "overlap", "policy", "tags", "target",
           "warn_alone", "warn_misspelled"]

logger = logging.getLogger("star_hvd")

_PREFIX = "STAR_"

KNOWN = (
    "ACCURACY", "BUILD_JOBS", "CACHE_DIR", "CHECK_LOCKS", "CPU_ONLY", "ENCRYPTION", "HOST", "INTERFACE", "LEAST_QUORUM",
    "LOG_DIR", "MODE", "MODEL", "NEIGHBOURS_DIR", "OVERLAP", "POLICY", "RUN_LOG", "RUN_TAGS", "SSHD", "SSH_KEYS",
    "SSH_PORT", "TARGET",
)  # fmt: skip
"""Names, without `STAR_`, of all variables of the package, its scripts and its image."""

_LAUNCHERS = (
    ("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    ("mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("mpirun", "PMI_SIZE", "PMI_RANK"),
)
"""Other launchers, with the variables that hold their number of processes and a process's own number.

Not `SLURM_NTASKS`, which the commands of a batch script have too, although each of them runs once.
"""

_NEAR = 0.75  # Of `difflib`; names are compared without `STAR_`, which would make any two of them similar.


@functools.cache
def warn_misspelled() -> None:
    """Warn, once per process, of variables that look like a misspelled one of ours, and so have no effect.

    Other programs' variables may begin with `STAR_` too, so names that resemble none of ours are not mentioned.
    """
    for name in sorted(os.environ):
        rest = name.removeprefix(_PREFIX)
        if name.startswith(_PREFIX) and rest not in KNOWN:
            for near in difflib.get_close_matches(rest.upper(), KNOWN, n=1, cutoff=_NEAR):
                logger.warning("%s has no effect; is STAR_%s meant?", name, near)


@functools.cache
def warn_alone() -> None:
    """Warn, once per process, if this job of one rank is one of several processes that `srun` or `mpirun` started.

    Without MPI, Horovod knows of other ranks by `horovodrun` only, so each process trains on its own. Only the first
    process warns.
    """
    if "HOROVOD_SIZE" in os.environ:
        return
    for launcher, size, number in _LAUNCHERS:
        count, own = os.environ.get(size, ""), os.environ.get(number, "0")
        if count.isdecimal() and int(count) > 1:
            if own == "0":
                logger.warning(
                    "%s started %s processes (%s), but each is a job of its own with one rank, since this Horovod has "
                    "no MPI; start one job with `horovodrun -np %s --gloo python ...` instead",
                    launcher, count, size, count,
                )  # fmt: skip
            return


def _text(name: str) -> str | None:
    return os.environ.get(name, "").strip() or None


def mode() -> str | None:
    """`STAR_MODE`: overrides the `mode` argument of `DistributedOptimizer`. Default: unset."""
    return _text("STAR_MODE")


def overlap() -> str | None:
    """`STAR_OVERLAP`: 1, 0 or `auto`, instead of the `overlap` argument of `DistributedOptimizer`. Default: unset."""
    return _text("STAR_OVERLAP")


def hierarchical() -> bool:
    """`HOROVOD_HIERARCHICAL_ALLREDUCE` (`horovodrun --hierarchical-allreduce`): 1 sums inside each host first."""
    return os.environ.get("HOROVOD_HIERARCHICAL_ALLREDUCE", "").strip() == "1"


def async_completion() -> str | None:
    """Return which variable has Horovod report a reduction on a GPU as done before it is, None if none does.

    `HOROVOD_ENABLE_ASYNC_COMPLETION`, or `HOROVOD_ENABLE_XLA_OPS`, which implies it; Horovod reads both by `strtol`.
    """
    for name in ("HOROVOD_ENABLE_ASYNC_COMPLETION", "HOROVOD_ENABLE_XLA_OPS"):
        number = re.match(r"\s*\+?(\d+)", os.environ.get(name, ""))
        if number is not None and int(number[1]) > 0:
            return name
    return None


def elastic() -> bool:
    """`HOROVOD_ELASTIC`, set by elastic `horovodrun` for its processes: the world may change its size."""
    return os.environ.get("HOROVOD_ELASTIC") == "1"


def host() -> str | None:
    """`STAR_HOST`: this rank's address for the others, one of its host. Default: derived from Horovod's settings."""
    return _text("STAR_HOST")


def interface() -> str | None:
    """`STAR_INTERFACE`: network interface of the channel. Default: `HOROVOD_GLOO_IFACE`, set by the launcher."""
    value = _text("STAR_INTERFACE") or _text("HOROVOD_GLOO_IFACE")
    return value.split(",")[0].strip() if value else None


def neighbours_folder() -> str | None:
    """`STAR_NEIGHBOURS_DIR`: where the user's jobs on a host find each other. Default: `/tmp/star-hvd-<uid>`."""
    return _text("STAR_NEIGHBOURS_DIR")


def policy() -> str | None:
    """`STAR_POLICY`: the policy of mode `auto`, instead of `Config.policy`. Default: unset."""
    return _text("STAR_POLICY")


def encryption() -> str | None:
    """`STAR_ENCRYPTION`: `all` or `network`, instead of `Config.encryption`. Default: unset."""
    return _text("STAR_ENCRYPTION")


def check_locks() -> bool:
    """`STAR_CHECK_LOCKS`: 1 asserts that locks are taken in the order of `star_hvd.locks`. Default: unchecked."""
    return _text("STAR_CHECK_LOCKS") == "1"


def least_quorum() -> float | None:
    """`STAR_LEAST_QUORUM`: a number used instead of `Config.least_quorum`. Default: unset.

    Raises:
        ValueError: It is not a number; `Config` checks its range.
    """
    value = _text("STAR_LEAST_QUORUM")
    if value is None:
        return None
    try:
        return float(value)
    except ValueError:
        raise ValueError(f"STAR_LEAST_QUORUM is {value!r}; expected a part of the ranks, 0.5 for example") from None


def target() -> str | None:
    """`STAR_TARGET`: the job's target, `accuracy>=0.95` for example, for the run log. Default: unset.

    `scheduler.target.Target` parses it; `JobLog` warns if it is invalid.
    """
    return _text("STAR_TARGET")


def accuracy() -> str | None:
    """`STAR_ACCURACY`: `exact` or `bounded`, instead of the `accuracy` argument of `DistributedOptimizer`. Default:
    unset.
    """
    return _text("STAR_ACCURACY")


def tags() -> dict[str, str] | None:
    """`STAR_RUN_TAGS`: tags of the job in the run log, `cluster=east,data=v3` for example. Default: unset.

    An item without `=` is a tag with value `yes`.
    """
    pairs = (text.partition("=") for text in os.environ.get("STAR_RUN_TAGS", "").split(",") if text.strip())
    return {name.strip(): value.strip() if equals else "yes" for name, equals, value in pairs} or None
