"""The sentences of a decision: which ranks are slow, why and since when, and what is predicted.

    rank 5 computes 3.1x slower since step 410: partial(7) is predicted 2.6x faster than sync, 90 % interval 2.2-2.9;
    grouped(2) 2.4x
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from scheduler.balance.share_policy import share_sentence
from scheduler.cost.cost_model import Prediction
from scheduler.diagnosis.slow_episodes import first_slow_step
from scheduler.diagnosis.stragglers import Readings, Straggler, find_stragglers
from scheduler.policy.candidates import StragglerSummary
from scheduler.records import Window
from scheduler.stats import listing, lower_median

__all__ = ["comparison", "who"]

_BECAUSE = {"compute": "", "input": ", waiting for data,", "starved": ", short of a processor,"}


def who(
    window: Window, trouble: StragglerSummary, freezes: Mapping[int, int], since: Mapping[int, int] | None = None
) -> str:
    """Which ranks are slow, why and since when; `nobody is slow` where none is.

    Args:
        window: Recent reports.
        trouble: The stragglers by the times to expect: ranks that are slow in turn are known by it alone.
        freezes: How often each rank froze that is expected to do so again.
        since: Steps at which ranks became slow, where that is longer ago than the window reaches.
    """
    readings = Readings.of(window)
    known = dict(since or {})
    found = [s for s in find_stragglers(window, readings=readings) if s.rank not in freezes or s.silent]
    parts = [
        f"rank {rank} has frozen {f'{count} times' if count > 1 else 'once'} of late"
        for rank, count in sorted(freezes.items())
    ]
    parts += [f"rank {s.rank} {s.evidence}" for s in found if (s.silent and s.rank not in freezes) or s.cause == "link"]
    for cause, words in _BECAUSE.items():
        same = [s for s in found if s.cause == cause and not s.silent]
        if same:
            parts.append(_together(same, words, known))
    named = {s.rank for s in found} | set(freezes)
    if not parts or not set(trouble.now_and_then) <= named:
        parts += [text for text in (_in_turn(readings, trouble, named, known),) if text]
    return "; ".join(parts) or "nobody is slow"


def _together(found: Sequence[Straggler], words: str, known: Mapping[int, int]) -> str:
    """`ranks 2 and 3 compute 2.0x slower since step 12`."""
    ranks = [s.rank for s in found]
    step = min(first_slow_step(s, known) for s in found)
    verb = "computes" if len(ranks) == 1 else "compute"
    return f"{listing(ranks)} {verb} {lower_median([s.slowdown for s in found]):.1f}x slower{words} since step {step}"


def _in_turn(readings: Readings, trouble: StragglerSummary, named: set[int], known: Mapping[int, int]) -> str:
    """`ranks 0, 1 and 4 compute 4.0x slower, one at a time, since step 5`; empty where no report is slow."""
    slow = [
        (step, rank, time_s / readings.reference_s)
        for rank in {*trouble.slow, *trouble.now_and_then} - named
        for (step, time_s), is_slow in zip(readings.reports[rank], readings.slow_reports(rank), strict=True)
        if is_slow
    ]
    if not slow:
        return ""
    ranks = sorted({rank for _, rank, _ in slow})
    factor = lower_median([ratio for _, _, ratio in slow])
    step = min(known.get(rank, step) for step, rank, _ in slow)
    if len(ranks) == 1:
        # Three slow reports name a rank, and a decision may come sooner: then it is not slow now and then.
        reports = zip(readings.reports[ranks[0]], readings.slow_reports(ranks[0]), strict=True)
        always = all(is_slow for (at, _), is_slow in reports if at >= step)
        return f"rank {ranks[0]} computes {factor:.1f}x slower{'' if always else ' now and then'} since step {step}"
    most = max(trouble.at_once)
    how = "" if most >= len(ranks) else ", one at a time," if most == 1 else f", up to {most} at once,"
    return f"{listing(ranks)} compute {factor:.1f}x slower{how} since step {step}"


def comparison(predictions: Sequence[Prediction], best: Prediction, now: Prediction | None) -> str:
    """What is predicted of the plan to be taken, and the runner-up of another mode.

    Args:
        predictions: All of them, best first.
        best: Of the plan to be taken.
        now: Of the one in force, None where it cannot run any more.
    """
    if best.plan.plain:
        if now is None or now.plan.plain:
            return "sync is predicted fastest"
        return f"sync is predicted {_ratio(now.relative):.1f}x faster than {now.plan.label}"
    high, low = (1.0 / max(bound, 1e-9) for bound in best.reported_interval)
    text = f"{best.plan.label} is predicted {1.0 / _ratio(best.relative):.1f}x faster than sync, "
    text += f"90 % interval {low:.1f}-{high:.1f}"
    if best.bound:
        text += ", the most that its mode can give"
    if best.plan.batch_shares:
        text += f"; {share_sentence(best.plan.batch_shares, best.relative)}"
    own = (best.plan.mode, best.plan.uneven)
    other = next((p for p in predictions if not p.plan.plain and (p.plan.mode, p.plan.uneven) != own), None)
    return text if other is None else f"{text}; {other.plan.label} {1.0 / _ratio(other.relative):.1f}x"


def _ratio(relative: float) -> float:
    return relative if math.isfinite(relative) and relative > 1e-9 else 1e-9
