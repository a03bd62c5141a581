"""Which model a job decides with: the one that STAR_MODEL names, the package's, or none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from scheduler.learning.predictor import SHIPPED, ModelError, load
from scheduler.learning.registry import fetch
from scheduler.policy.cost_policy import Ranker

__all__ = ["find_ranker", "learned_policy"]


_OFF = ("cost_model", "none", "off", "0")


def find_ranker(environ: Mapping[str, str], warn: Callable[[str], None]) -> Ranker | None:
    """The ranker a job decides with.

    `STAR_MODEL` is a model's folder, an MLflow URI like `models:/star-tta@champion`, or `cost_model` for none. Without
    it, the model that comes with the package. One from elsewhere is tried in another process first.

    Args:
        environ: The environment.
        warn: Told once, in a sentence, why there is no model.

    Returns:
        None where the cost model decides alone: it was asked for, or the model cannot be used. Fetching from a registry
        takes `registry.FETCH_S` at most.
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
    """A policy with the model that `STAR_MODEL` or the package gives, for `benchmarks.policy`.

    Raises:
        ModelError: There is none.
    """
    import os

    from scheduler.policy.cost_policy import CostPolicy

    global _ranker
    if _ranker is None:
        problems: list[str] = []
        _ranker = find_ranker(os.environ, problems.append)
        if _ranker is None:
            raise ModelError(problems[0] if problems else "STAR_MODEL asks for the cost model")
    return CostPolicy(world_size, ranker=_ranker, hosts=hosts)


_ranker: Ranker | None = None
