"""The text of a decision: which ranks are slow, why and since when, and what is predicted.

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
from scheduler.policy.candidates import StragglerSummary, same_plan
from scheduler.records import Window
from scheduler.stats import listing, lower_median

__all__ = ["comparison", "describe_stragglers"]

_BECAUSE = {"compute": "", "input": ", waiting for data,", "starved": ", short of a processor,"}


def describe_stragglers(
    window: Window,
    stragglers: StragglerSummary,
    freezes: Mapping[int, int],
    since: Mapping[int, int] | None = None,
    last_slow_links: Mapping[int, int] | None = None,
) -> str:
    """Which ranks are slow, why and since when; `no rank is slow` if none is, nor is expected to be.

    Args:
        window: Recent reports.
        stragglers: Stragglers by the expected times and rates, the only source for ranks that take turns in being slow
            and for links that are slow at times.
        freezes: Number of freezes of each rank that is expected to freeze again.
        since: Steps at which ranks became slow, if before the window's first.
        last_slow_links: Last steps at which links were slow (`LinkMemory.last_slow`).
    """
    readings = Readings.of(window)
    known = dict(since or {})
    found = [s for s in find_stragglers(window, readings=readings) if s.rank not in freezes or s.silent]
    parts = [
        f"rank {rank} froze {f'{count} times' if count > 1 else 'once'} recently"
        for rank, count in sorted(freezes.items())
    ]
    parts += [f"rank {s.rank} {s.evidence}" for s in found if (s.silent and s.rank not in freezes) or s.cause == "link"]
    for cause, words in _BECAUSE.items():
        same = [s for s in found if s.cause == cause and not s.silent]
        if same:
            parts.append(_together(same, words, known))
    named = {s.rank for s in found} | set(freezes)
    if not parts or not set(stragglers.intermittent) <= named:
        parts += [text for text in (_in_turn(readings, stragglers, named, known),) if text]
    by_link = {s.rank for s in found if s.cause == "link"}
    parts += _expected_links(set(stragglers.links) - by_link, last_slow_links or {}, window.step)
    if not parts and stragglers:  # Means and medians differ a little, or a rank has ceased to be expected to freeze.
        ranks = sorted({*stragglers.slow, *stragglers.intermittent, *stragglers.frozen})
        parts.append(f"{listing(ranks)} {'is' if len(ranks) == 1 else 'are'} expected to be slower")
    return "; ".join(parts) or "no rank is slow"


def _expected_links(ranks: set[int], last_slow: Mapping[int, int], step: int) -> list[str]:
    """`rank 3 had a slow link until step 96, which is expected again`, of links that the window does not show."""
    slow_now = sorted(rank for rank in ranks if last_slow.get(rank) == step)
    before, parts = sorted(ranks.difference(slow_now)), []
    if slow_now:
        parts.append(f"{listing(slow_now)} {'has a slow link' if len(slow_now) == 1 else 'have slow links'}")
    if before:
        known = [last_slow[rank] for rank in before if rank in last_slow]
        until = f" until step {max(known)}" if known else ""
        had = f"had a slow link{until}, which is" if len(before) == 1 else f"had slow links{until}, which are"
        parts.append(f"{listing(before)} {had} expected again")
    return parts


def _together(found: Sequence[Straggler], words: str, known: Mapping[int, int]) -> str:
    """`ranks 2 and 3 compute 2.0x slower since step 12`."""
    ranks = [s.rank for s in found]
    step = min(first_slow_step(s, known) for s in found)
    verb = "computes" if len(ranks) == 1 else "compute"
    return f"{listing(ranks)} {verb} {lower_median([s.slowdown for s in found]):.1f}x slower{words} since step {step}"


def _in_turn(readings: Readings, stragglers: StragglerSummary, named: set[int], known: Mapping[int, int]) -> str:
    """`ranks 0, 1 and 4 compute 4.0x slower, one at a time, since step 5`; empty if no report is slow."""
    slow = [
        (step, rank, time_s / readings.reference_s)
        for rank in {*stragglers.slow, *stragglers.intermittent} - named
        for (step, time_s), is_slow in zip(readings.reports[rank], readings.slow_reports(rank), strict=True)
        if is_slow
    ]
    if not slow:
        return ""
    ranks = sorted({rank for _, rank, _ in slow})
    factor = lower_median([ratio for _, _, ratio in slow])
    step = min(known.get(rank, step) for step, rank, _ in slow)
    if len(ranks) == 1:
        # A decision may precede the third slow report, which makes a rank a straggler: check for intermittent slowness.
        reports = zip(readings.reports[ranks[0]], readings.slow_reports(ranks[0]), strict=True)
        always = all(is_slow for (at, _), is_slow in reports if at >= step)
        return f"rank {ranks[0]} computes {factor:.1f}x slower{'' if always else ' intermittently'} since step {step}"
    most = max(stragglers.at_once)
    how = "" if most >= len(ranks) else ", one at a time," if most == 1 else f", up to {most} at once,"
    return f"{listing(ranks)} compute {factor:.1f}x slower{how} since step {step}"


def comparison(predictions: Sequence[Prediction], best: Prediction, now: Prediction | None) -> str:
    """The prediction for the chosen plan, and for the runner-up of another mode.

    Args:
        predictions: All predictions, best first.
        best: The prediction for the chosen plan.
        now: The prediction for the active plan, None if it can no longer run.
    """
    if best.plan.plain:
        if now is None or now.plan.plain:
            return "sync is predicted fastest"
        return f"sync is predicted {_ratio(now.relative):.1f}x faster than {now.plan.label}"
    high, low = (1.0 / max(bound, 1e-9) for bound in best.reported_interval)
    text = f"{best.plan.label} is predicted {1.0 / _ratio(best.relative):.1f}x faster than sync, "
    text += f"90 % interval {low:.1f}-{high:.1f}"
    if best.bound:
        text += ", the upper bound of its mode"
    if best.plan.batch_shares:
        text += f"; {share_sentence(best.plan.batch_shares, best.relative)}"
    text += _transmission(predictions, best)
    own = (best.plan.mode, best.plan.uneven, best.plan.steal)
    others = (p for p in predictions if not p.plan.plain and (p.plan.mode, p.plan.uneven, p.plan.steal) != own)
    other = next(others, None)
    return text if other is None else f"{text}; {other.plan.label} {1.0 / _ratio(other.relative):.1f}x"


_TRAVELS = {"ps": "gradients and parameters of", "local": "averagings of"}


def _transmission(predictions: Sequence[Prediction], best: Prediction) -> str:
    """`; averagings of local(4) travel behind compute: 0.31 s instead of 0.47 s a step`; empty if none do."""
    if best.plan.transmission is None or not best.plan.transmission.background:
        return ""
    plain = best.plan.replace(transmission=None)
    other = next((one for one in predictions if same_plan(one.plan, plain)), None)
    text = f"; {_TRAVELS.get(plain.mode, 'late gradients of')} {plain.label} travel behind compute"
    per = "a step" if plain.mode == "local" else "between updates"
    return text if other is None else f"{text}: {best.interval_s:.2g} s instead of {other.interval_s:.2g} s {per}"


def _ratio(relative: float) -> float:
    return relative if math.isfinite(relative) and relative > 1e-9 else 1e-9
