"""The environment variables with which users set how a job trains, one function each.

Others are read where they are used: `STAR_MODEL` (`runtime/model_loader.py`), `STAR_LOG_DIR`, `STAR_RUN_LOG` and
MLflow's (`run_log/layout.py`).

`horovodrun` exports the environment to all ranks, so a variable set at the launcher reaches every host.
"""

from __future__ import annotations

import os

__all__ = ["accuracy", "check_locks", "elastic", "encryption", "hierarchical", "host", "interface", "least_quorum",
           "mode", "overlap", "policy", "tags", "target"]


def mode() -> str | None:
    """`STAR_MODE`: overrides the `mode` argument of `DistributedOptimizer`. Default: unset."""
    return os.environ.get("STAR_MODE") or None


def overlap() -> str | None:
    """`STAR_OVERLAP`: 1, 0 or `auto`, instead of the `overlap` argument of `DistributedOptimizer`. Default: unset."""
    return os.environ.get("STAR_OVERLAP", "").strip() or None


def hierarchical() -> bool:
    """`HOROVOD_HIERARCHICAL_ALLREDUCE` (`horovodrun --hierarchical-allreduce`): 1 sums inside each host first."""
    return os.environ.get("HOROVOD_HIERARCHICAL_ALLREDUCE", "").strip() == "1"


def elastic() -> bool:
    """`HOROVOD_ELASTIC`, set by elastic `horovodrun` for its processes: the world may change its size."""
    return os.environ.get("HOROVOD_ELASTIC") == "1"


def host() -> str | None:
    """`STAR_HOST`: this rank's address for the others. Default: derived from Horovod's settings."""
    return os.environ.get("STAR_HOST") or None


def interface() -> str | None:
    """`STAR_INTERFACE`: network interface of the channel. Default: `HOROVOD_GLOO_IFACE`, set by the launcher."""
    value = os.environ.get("STAR_INTERFACE") or os.environ.get("HOROVOD_GLOO_IFACE")
    return value.split(",")[0] if value else None


def policy() -> str | None:
    """`STAR_POLICY`: the policy of mode `auto`, instead of `Config.policy`. Default: unset."""
    return os.environ.get("STAR_POLICY") or None


def encryption() -> str | None:
    """`STAR_ENCRYPTION`: `all` or `network`, instead of `Config.encryption`. Default: unset."""
    return os.environ.get("STAR_ENCRYPTION") or None


def check_locks() -> bool:
    """`STAR_CHECK_LOCKS`: 1 asserts that locks are taken in the order of `star_hvd.locks`. Default: unchecked."""
    return os.environ.get("STAR_CHECK_LOCKS") == "1"


def least_quorum() -> float | None:
    """`STAR_LEAST_QUORUM`: a number used instead of `Config.least_quorum`. Default: unset.

    Raises:
        ValueError: It is not a number; `Config` checks its range.
    """
    value = os.environ.get("STAR_LEAST_QUORUM", "").strip()
    if not value:
        return None
    try:
        return float(value)
    except ValueError:
        raise ValueError(f"STAR_LEAST_QUORUM is {value!r}; expected a part of the ranks, 0.5 for example") from None


def target() -> str | None:
    """`STAR_TARGET`: the job's target, `accuracy>=0.95` for example, for the run log. Default: unset.

    `scheduler.target.Target` parses it; `JobLog` warns if it is invalid.
    """
    return os.environ.get("STAR_TARGET") or None


def accuracy() -> str | None:
    """`STAR_ACCURACY`: `exact` or `bounded`, instead of the `accuracy` argument of `DistributedOptimizer`. Default:
    unset.
    """
    return os.environ.get("STAR_ACCURACY", "").strip() or None


def tags() -> dict[str, str] | None:
    """`STAR_RUN_TAGS`: tags of the job in the run log, `cluster=east,data=v3` for example. Default: unset.

    An item without `=` is a tag with value `yes`.
    """
    pairs = (text.partition("=") for text in os.environ.get("STAR_RUN_TAGS", "").split(",") if text.strip())
    return {name.strip(): value.strip() if equals else "yes" for name, equals, value in pairs} or None
