"""Accuracy of the next-iteration forecast on recorded traces, against last value, running mean and running median.

The traces are STAR's logs of ten networks with 8 undisturbed workers: a row per iteration, a time per worker. Two
have every part of a worker's time (`complete`); the others have only the network part. Every method reads one row
after the other and forecasts the next. The last 30 % of the rows are scored; the first 70 % may be used for fitting
(thresholds; the forecaster fits itself online).

Error: mean absolute, in ms. Stragglers: balanced accuracy (0.5 is what constant yes or constant no scores), by three
definitions:

    next        the worker's time exceeds 1.2 times the median of its row
    persistent  `next` holds in at least two of the next three rows
    job         the row's longest time exceeds its shortest by 20 % (STAR's definition, true in most rows)

`rule` applies the definition to the forecast times themselves, as STAR does; `fitted` compares a score (the forecast
ratio; for the forecaster its probability) with the threshold that was best on the first 70 %.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.lab.json_option import json_file
from scheduler.diagnosis.forecast import Forecaster, LastValue, RunningMean, RunningMedian
from scheduler.diagnosis.stragglers import find_stragglers
from scheduler.records import RankStats, Window

__all__ = ["evaluate", "false_alarms", "main", "read_matrices"]

Array = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

COMPLETE = ("transformer", "alexnet_ratio")
FIT_SHARE = 0.7
SLOW = 1.2
WARM_UP = 5  # Rows excluded from fitting thresholds.
HISTORY = 64  # Reports in a window of a live job.


def read_matrices(path: Path) -> dict[str, Array]:
    """Return the times of all rounds of every trace in seconds, shape (n_rounds, n_workers) each.

    A round's time is the worker's computation, plus sending its gradient to the server, plus receiving the parameters;
    the last is logged one round late. The first two rounds are start-up.

    Raises:
        ValueError: The file does not have that form; the message says what is missing.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        found = {}
        for name, trace in document.items():
            there = np.asarray(trace["ssgd"]["in_ms"], dtype=np.float64)
            back = np.asarray(trace["ssgd"]["prev_out_ms"], dtype=np.float64)
            times = there[:-1] + back[1:]
            if "worker_compute_ms" in trace:
                compute = _compute_ms(trace)
                rounds = min(len(times), len(compute))
                times = times[:rounds] + compute[:rounds]
            found[str(name)] = times[2:] * 1e-3
    except (OSError, KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{path} is no file of traces ({type(error).__name__}: {error}); expected JSON of the form "
            '{name: {"ssgd": {"in_ms": [[...]], "prev_out_ms": [[...]]}, "worker_compute_ms": [[...]]}}'
        ) from error
    return found


def _compute_ms(trace: dict[str, Any]) -> Array:
    """Return compute times in ms, shape (n_rounds, n_workers)."""
    columns = trace["worker_compute_ms"]
    rounds = min(len(column) for column in columns)
    return np.asarray([column[:rounds] for column in columns], dtype=np.float64).T


def evaluate(times_s: Array, fit_share: float = FIT_SHARE) -> dict[str, Any]:
    """Return errors and balanced accuracies of all methods on one trace.

    Args:
        times_s: Shape (n_rounds, n_workers).
        fit_share: Leading part of the rounds, which is not scored.

    Returns:
        `error_ms` per method; `coverage_90` of the forecaster's 5 % to 95 % interval; per definition `positives`,
        `share`, and per method `rule`, `fitted` and `auc`, null if all or no rounds are positive.
    """
    medians, slow, spread, low, high = replayed(times_s)
    split = int(len(times_s) * fit_share)
    judged = slice(split, len(times_s))
    errors = {name: 1e3 * float(np.mean(np.abs(m[judged] - times_s[judged]))) for name, m in medians.items()}
    inside = (times_s[judged] >= low[judged]) & (times_s[judged] <= high[judged])
    result: dict[str, Any] = {
        "rounds": len(times_s),
        "judged": len(times_s) - split,
        "mean_ms": 1e3 * float(times_s[judged].mean()),
        "error_ms": errors,
        "coverage_90": float(inside.mean()),
    }
    row = np.log(times_s / np.median(times_s, axis=1, keepdims=True))
    next_slow = row > math.log(SLOW)
    persistent = np.zeros_like(next_slow)
    persistent[:-2] = next_slow[:-2].astype(int) + next_slow[1:-1] + next_slow[2:] >= 2
    job = np.log(times_s.max(axis=1) / times_s.min(axis=1)) > math.log(SLOW)
    for name, labels, ours in (("next", next_slow, slow), ("persistent", persistent, slow), ("job", job, spread)):
        end = len(times_s) - (2 if name == "persistent" else 0)
        scores = {method: _ratio(m, job=name == "job") for method, m in medians.items()}
        result[name] = _judge(labels[:end], {m: s[:end] for m, s in scores.items()}, ours[:end], split)
    return result


def replayed(times_s: Array) -> tuple[dict[str, Array], Array, Array, Array, Array]:
    """Forecast a trace one step ahead; return forecasts of all methods, probabilities, and the 90 % interval."""
    ranks = times_s.shape[1]
    forecaster = Forecaster(ranks)
    baselines: dict[str, LastValue | RunningMean | RunningMedian] = {
        "last": LastValue(ranks),
        "mean": RunningMean(ranks),
        "median": RunningMedian(ranks),
    }
    medians: dict[str, list[Array]] = {name: [] for name in ("forecast", *baselines)}
    slow, spread, low, high = [], [], [], []
    for row in times_s:
        found = forecaster.forecast((0.05, 0.95), SLOW)
        medians["forecast"].append(found.median_s)
        slow.append(found.slow)
        spread.append(found.spread)
        low.append(found.quantile_s[0])
        high.append(found.quantile_s[1])
        for name, baseline in baselines.items():
            medians[name].append(baseline.median_s())
            baseline.update(row)
        forecaster.update(row)
    arrays = {name: np.array(values) for name, values in medians.items()}
    return arrays, np.array(slow), np.array(spread), np.array(low), np.array(high)


def _ratio(medians: Array, *, job: bool) -> Array:
    """Return the logarithm of the ratio that the definition compares with its threshold."""
    if job:
        return np.asarray(np.log(medians.max(axis=1) / medians.min(axis=1)))
    return np.asarray(np.log(medians / np.median(medians, axis=1, keepdims=True)))


def _judge(labels: Flags, scores: dict[str, Array], ours: Array, split: int) -> dict[str, Any]:
    truth, past = labels[split:], labels[WARM_UP:split]
    result: dict[str, Any] = {"positives": int(truth.sum()), "share": float(truth.mean())}
    for name, score in scores.items():
        fitted = ours if name == "forecast" else score
        limit = _best_limit(fitted[WARM_UP:split], past)
        result[name] = {
            "rule": balanced_accuracy(score[split:] > math.log(SLOW), truth),
            "fitted": balanced_accuracy(fitted[split:] > limit, truth),
            "auc": area_under_curve(fitted[split:], truth),
        }
    return result


def balanced_accuracy(said: Flags, truth: Flags) -> float | None:
    """Return the mean of the true positive rate and the true negative rate."""
    if truth.all() or not truth.any():
        return None
    return 0.5 * (float(said[truth].mean()) + float((~said)[~truth].mean()))


def area_under_curve(score: Array, truth: Flags) -> float | None:
    """Return the probability that a positive has a higher score than a negative."""
    if truth.all() or not truth.any():
        return None
    yes, no = score[truth][:, None], score[~truth][None, :]
    return float(np.mean(yes > no) + 0.5 * np.mean(yes == no))


def _best_limit(score: Array, truth: Flags) -> float:
    limits = np.unique(np.quantile(score, np.linspace(0.0, 1.0, 101)))
    found = [balanced_accuracy(score > limit, truth) for limit in limits]
    if any(value is None for value in found):
        return math.inf
    return float(limits[int(np.argmax(np.array(found, dtype=np.float64)))])


def false_alarms(compute_s: Array) -> float:
    """Return the share of windows in which `find_stragglers` names a rank although no worker is disturbed.

    Args:
        compute_s: Times before the collective, shape (n_rounds, n_workers); every round ends one window.
    """
    named = 0
    for end in range(1, len(compute_s) + 1):
        first = max(0, end - HISTORY)
        steps = tuple(range(first, end))
        ranks = tuple(
            RankStats(rank=rank, compute_s=tuple(compute_s[first:end, rank].tolist()), steps=steps)
            for rank in range(compute_s.shape[1])
        )
        named += bool(find_stragglers(Window(step=end, ranks=ranks)))
    return named / len(compute_s)


def cost_us(ranks: int, rounds: int = 200) -> float:
    """Return the processor time in microseconds to learn one iteration and forecast the next."""
    draw = np.random.default_rng(0)
    rows = 0.1 * np.exp(0.05 * draw.normal(size=(rounds, ranks)))
    forecaster = Forecaster(ranks)
    began_s = time.process_time()
    for row in rows:
        forecaster.update(row)
        forecaster.forecast()
    return 1e6 * (time.process_time() - began_s) / rounds


def _summary(traces: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the geometric mean of our error over each baseline's, and on how many traces ours is lower."""
    found = {}
    for other in ("last", "mean", "median"):
        ratios = [trace["error_ms"]["forecast"] / trace["error_ms"][other] for trace in traces.values()]
        found[other] = {
            "error_ratio": float(np.exp(np.mean(np.log(ratios)))),
            "wins": sum(ratio < 1.0 for ratio in ratios),
            "of": len(ratios),
        }
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Print the comparison and write it as JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.forecast", description=__doc__.splitlines()[0])
    default = Path(__file__).resolve().parents[2] / "shared/data/star/traces.json"
    parser.add_argument("--traces", type=Path, default=default, help="STAR's logs as JSON (default: %(default)s)")
    parser.add_argument("--json", type=json_file, help="file to write")
    args = parser.parse_args(argv)
    try:
        matrices = read_matrices(args.traces)
        document = json.loads(args.traces.read_text(encoding="utf-8"))
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    traces = {name: {"complete": name in COMPLETE, **evaluate(times)} for name, times in matrices.items()}
    alarms = {n: false_alarms(1e-3 * _compute_ms(t)[2:]) for n, t in document.items() if "worker_compute_ms" in t}
    result = {
        "traces": traces,
        "summary": _summary(traces),
        "false_alarm_share": alarms,
        "cost_us": {str(ranks): cost_us(ranks) for ranks in (8, 1024)},
    }
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    _print(result, sys.stdout.write)
    return 0


def _print(result: dict[str, Any], write: Callable[[str], Any]) -> None:
    methods = ("forecast", "last", "mean", "median")
    write(f"{'trace':18} {'error ms':>27}   {'next, fitted':>23}   {'job, fitted':>23}  90 %\n")
    write(f"{'':18} {' '.join(f'{name[:6]:>6}' for name in methods)}   {'':23}   {'':23}\n")
    for name, trace in sorted(result["traces"].items(), key=lambda item: not item[1]["complete"]):
        cells = [" ".join(f"{trace['error_ms'][method]:6.1f}" for method in methods)]
        for label in ("next", "job"):
            cells.append(" ".join(_cell(trace[label][method]["fitted"]) for method in methods))
        mark = "*" if trace["complete"] else " "
        write(f"{name:17}{mark} {'   '.join(cells)}  {trace['coverage_90']:.2f}\n")
    for label in ("next", "persistent", "job"):
        for kind in ("rule", "fitted", "auc"):
            for name in (n for n in COMPLETE if n in result["traces"]):
                trace = result["traces"][name][label]
                told = ", ".join(f"{method} {_cell(trace[method][kind]).strip()}" for method in methods)
                write(f"{label:10} {kind:6} {name:14} ({trace['positives']} positives): {told}\n")
    for other, found in result["summary"].items():
        write(f"error over that of {other}: {found['error_ratio']:.3f}, better on {found['wins']} of {found['of']}\n")
    for name, share in result["false_alarm_share"].items():
        write(f"windows with a false alarm, {name}: {share:.1%}\n")
    write(", ".join(f"{cost:.0f} us an iteration with {n} ranks" for n, cost in result["cost_us"].items()) + "\n")


def _cell(value: float | None) -> str:
    return "    -" if value is None else f"{value:5.3f}"


if __name__ == "__main__":
    sys.exit(main())
