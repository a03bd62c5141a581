"""Selects the model that a job decides with: the one of STAR_MODEL, the package's, or none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from scheduler.learning.predictor import SHIPPED, ModelError, Predictor, load
from scheduler.learning.registry import fetch

__all__ = ["find_ranker", "learned_policy"]


_OFF = ("cost_model", "none", "off", "0")


def find_ranker(environ: Mapping[str, str], warn: Callable[[str], None]) -> Predictor | None:
    """Load the ranker of a job; fetching from a registry takes at most `registry.FETCH_S`.

    `STAR_MODEL` is a model's folder, an MLflow URI such as `models:/star-tta@champion`, or `cost_model` for none. The
    default is the package's model. Any other model is first tried in another process.

    Args:
        environ: The environment.
        warn: Called once with a sentence if the model cannot be used.

    Returns:
        None if the cost model decides alone: it was requested, or the model cannot be used.
    """
    wanted = environ.get("STAR_MODEL", "").strip()
    if wanted.lower() in _OFF:
        return None
    try:
        if wanted.startswith("models:/"):
            return load(fetch(wanted, environ))
        return load(Path(wanted) if wanted else SHIPPED)
    except ModelError as error:
        named = f"STAR_MODEL {wanted}" if wanted else "the model of this package"
        warn(f"{named} cannot be used: {error}. The cost model decides.")
        return None


def learned_policy(world_size: int, hosts: Sequence[str] | None = None) -> Any:
    """A policy with the model of `STAR_MODEL` or of the package, for `benchmarks.policy`.

    Raises:
        ModelError: The model cannot be used, or STAR_MODEL selects the cost model.
    """
    import os

    from scheduler.policy.cost_policy import CostPolicy

    global _ranker
    if _ranker is None:
        problems: list[str] = []
        _ranker = find_ranker(os.environ, problems.append)
        if _ranker is None:
            raise ModelError(problems[0] if problems else "STAR_MODEL selects the cost model")
    return CostPolicy(world_size, ranker=_ranker, hosts=hosts)


_ranker: Predictor | None = None
