"""Sends one run to MLflow. It resumes where it stopped, and sending again is idempotent.

The run and its segments are found by tag `star.run`, so a sender killed between creating a run and noting its id does
not create a second one. Entries have the times of their events, so a batch that is sent twice is stored once.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from scheduler.mlflow_limits import limit_requests
from scheduler.redact import redacted
from star_hvd.run_log import layout
from star_hvd.run_log.convert import MetricRow, RunState, flat, point_metric, transmission_metric, window_metrics
from star_hvd.run_log.spool import read_events

__all__ = ["Sender", "connect"]

logger = logging.getLogger("star_hvd.run_log")

_BATCH = 900  # MLflow accepts 1,000 metrics in one request.
_SQLITE = "sqlite:///"
_MOST_SEGMENTS = 200  # Maximum number of segments that become MLflow runs; the event file has all of them.


def connect(uri: str) -> Any:
    """Return an MLflow client. Imports MLflow, so do not use it in processes that train."""
    limit_requests()
    from mlflow.tracking import MlflowClient

    if uri.startswith(_SQLITE):
        make_database(Path(uri[len(_SQLITE) :]), lambda draft: MlflowClient(tracking_uri=draft))
    return MlflowClient(tracking_uri=uri)


def make_database(path: Path, open_client: Callable[[str], Any]) -> None:
    """Create MLflow's SQLite file atomically: a file whose first migration was killed can no longer be opened."""
    if path.exists() or not path.parent.is_dir():
        return
    draft = layout.draft_of(path.with_name(f".{path.name}"))
    try:
        open_client(f"{_SQLITE}{draft}").search_experiments(max_results=1)
        with contextlib.suppress(OSError):  # It exists by now, or the file system has no links and MLflow creates it.
            os.link(draft, path)
    finally:
        for left in path.parent.glob(f"{draft.name}*"):
            with contextlib.suppress(OSError):
                left.unlink()


class Sender:
    """Sends one run.

    Args:
        directory: The run's folder.
        uri: MLflow's tracking URI.
        experiment: The experiment the run belongs to; by default that in `run.json`, which the job had. A run that
            MLflow already has stays where it is.
        on_progress: Called whenever MLflow has something that it had not before, and while the page is made for the
            first time. What a repeated attempt sends again does not count: the attempts would never end.
        batch: Most metrics in one request.

    Raises:
        ValueError: The folder contains no run, a damaged one, or one of another version.
    """

    def __init__(
        self,
        directory: Path,
        uri: str,
        *,
        experiment: str | None = None,
        on_progress: Callable[[], None] = lambda: None,
        batch: int = _BATCH,
    ) -> None:
        about = layout.read_about(directory)
        self.directory = directory
        self.uri = uri
        self.state = RunState()
        self._about = about
        self._root = directory.parent.parent
        self._client: Any = None
        noted = about.get("experiment")
        self._named = experiment or (noted if isinstance(noted, str) and noted else layout.experiment_name())
        self._on_progress, self._batch = on_progress, batch
        self._experiment = ""
        self._offset = 0
        self._connected = False  # Whether MLflow has answered.
        self._page_of: dict[str, int] | None = None  # Sizes of the files that the page was made of.
        self._params: dict[str, str] = {}
        sent = layout.read_json(directory / layout.SENT)
        self._shown_uri = redacted(uri)  # For logs and `sent.json`.
        known = sent.get("uri") == self._shown_uri and _is_note(sent)
        self._sent: dict[str, Any] = sent if known else {"uri": self._shown_uri}
        self._sent.setdefault("segments", {})

    @property
    def complete(self) -> bool:
        """Whether MLflow has everything, including the files."""
        return bool(self._sent.get("complete"))

    def send(self) -> bool:
        """Send new events; return whether the end event has been read.

        Raises:
            Exception: Any error of MLflow's; a later call continues after what was sent.
        """
        self._connect()
        if not self._about.get("home"):
            return False
        try:
            self._send_events()
        except BaseException:
            self.state, self._offset = RunState(), 0  # An event may be partly applied.
            raise
        return self.state.status is not None

    def finish(self, status: str) -> None:
        """Send the totals, end the run and send its files.

        The page is last: of a job of days it takes minutes, in which the process may be killed.

        Args:
            status: Status of a run without an end event, `KILLED` for example.

        Raises:
            Exception: Any error of MLflow's; a later call continues.
        """
        self.send()
        if self._about.get("home"):
            self._end_segment(len(self.state.segments) - 1)
            end_ms = self._at_ms(self.state.last_s)
            self._log([(name, value, end_ms, self.state.last_step) for name, value in self.state.totals().items()])
            self._client.set_terminated(self._sent["run_id"], self.state.status or status, end_time=end_ms)
        self._send_files()
        self._sent["complete"] = True
        self._sent.pop("files", None)  # If the run is sent again, its files are, too.
        self._note(self._offset)
        self._on_progress()

    def _send_events(self) -> None:
        rows: list[MetricRow] = []
        for offset, event in read_events(self.directory / layout.EVENTS, self._offset):
            self.state.take(event)
            self._offset = offset
            if offset <= self._sent.get("offset", 0):
                continue
            rows.extend(self._act(event, self._about["began_unix_s"]))
            if len(rows) >= self._batch:
                self._log(rows)
                rows = []
                self._note(offset)
        self._log(rows)
        self._note(self._offset)

    def _act(self, event: dict[str, Any], began_unix_s: float) -> Iterable[MetricRow]:
        kind = event.get("kind")
        if kind == "facts":
            self._send_facts()
        elif kind == "plan":
            if self.state.segments[-1].plan != event:
                return ()  # It began no segment.
            self._end_segment(len(self.state.segments) - 2)
            self._begin_segment()
        elif kind == "outcome":
            # It may come after the plan that ended its segment. The open segment is sent at its end.
            for segment in self.state.segments[:-1]:
                if segment.outcome == event:
                    self._end_segment(segment.index)
        elif kind == "window":
            return window_metrics(event, began_unix_s, self.state.windows - 1)
        elif kind == "metric":
            return point_metric(event, began_unix_s)
        elif kind == "transmission":
            return transmission_metric(event, began_unix_s)
        return ()

    def _connect(self) -> None:
        if self._client is not None:
            return
        client = connect(self.uri)
        run_id = self._sent.get("run_id")
        run = None if run_id is None else _active_run(client, run_id)
        if run is None:
            self._experiment = _experiment_id(client, self._named, self.uri, self._root)
            if run_id is not None:
                self._sent = {"uri": self._shown_uri, "segments": {}}  # Deleted in MLflow: send it again.
        else:
            self._experiment = str(run.info.experiment_id)
        if not self._connected:  # Its tables may have been created, which takes seconds.
            self._connected = True
            self._on_progress()
        if "run_id" not in self._sent:
            tags = {"star.schema": str(layout.SCHEMA), "star.kind": "job"}
            self._sent["run_id"] = self._run(client, self._about["name"], self._about["name"], 0.0, tags)
            self._note(0)
            self._on_progress()
        self._params = dict(client.get_run(self._sent["run_id"]).data.params)
        self._client = client  # Last: if a request fails, the next call begins again.

    def _run(self, client: Any, key: str, name: str, time_s: float, tags: dict[str, str]) -> str:
        """Return the id of the run tagged with `key`; create one if there is none."""
        found = client.search_runs([self._experiment], f"tags.`star.run` = '{key}'", max_results=1)
        if found:
            return str(found[0].info.run_id)
        tags = {**tags, "star.run": key}
        made = client.create_run(self._experiment, start_time=self._at_ms(time_s), tags=tags, run_name=name)
        return str(made.info.run_id)

    def _send_facts(self) -> None:
        from mlflow.entities import Param, RunTag

        values = flat(self.state.facts)
        new = {name: value for name, value in values.items() if name not in self._params}
        # MLflow's parameters cannot change; changed values become tags.
        changed = {name: value for name, value in values.items() if self._params.get(name, value) != value}
        items = list(new.items())
        for at in range(0, len(items), 100):
            params = [Param(name, value) for name, value in items[at : at + 100]]
            self._client.log_batch(self._sent["run_id"], params=params)
        tags = [RunTag(f"star.changed.{name}", value) for name, value in changed.items()]
        if tags:
            self._client.log_batch(self._sent["run_id"], tags=tags[:100])
        self._params |= new

    def _begin_segment(self) -> None:
        segment = self.state.segments[-1]
        if segment.index >= _MOST_SEGMENTS:
            return
        from mlflow.entities import Param

        plan, name = segment.plan, self._about["name"]
        key = f"{name}/{segment.index}"
        tags = {
            "mlflow.parentRunId": self._sent["run_id"],
            "star.schema": str(layout.SCHEMA),
            "star.kind": "segment",
            "star.reason": str(plan.get("reason", ""))[:1000],
        }
        title = f"step {plan.get('step')}: {plan.get('label')}"
        run_id = self._run(self._client, key, title, segment.first_s, tags)
        values = flat({"label": plan.get("label"), "step": plan.get("step"), "plan": plan.get("plan") or {}})
        values |= flat({"prediction": plan.get("prediction") or {}})
        self._client.log_batch(run_id, params=[Param(*item) for item in list(values.items())[:100]])
        known = self._sent["segments"].get(str(segment.index))
        self._sent["segments"][str(segment.index)] = run_id
        if run_id != known:
            self._on_progress()

    def _end_segment(self, index: int) -> None:
        run_id = self._sent["segments"].get(str(index))
        if run_id is not None:
            segment = self.state.segments[index]
            end_ms = self._at_ms(segment.last_s)
            rows = [(name, value, end_ms, segment.last_step) for name, value in segment.summary().items()]
            self._log(rows, run_id)
            self._client.set_terminated(run_id, "FINISHED", end_time=end_ms)

    def _log(self, rows: list[MetricRow], run_id: str | None = None) -> None:
        from mlflow.entities import Metric

        for at in range(0, len(rows), self._batch):
            metrics = [Metric(*row) for row in rows[at : at + self._batch]]
            self._client.log_batch(run_id or self._sent["run_id"], metrics=metrics)

    def _send_files(self) -> None:
        """Send the run's files as artifacts; a host other than rank 0's has only the files of its own ranks.

        Files that MLflow accepted before a failure are not sent again unless they have grown.
        """
        for path in sorted(self.directory.glob("rank*.jsonl")):
            self._send_file(path)
        if self._about.get("home"):
            self._send_file(self.directory / layout.RUN)
            self._send_file(self.directory / layout.EVENTS)
            page = self.directory / "report.html"
            with contextlib.suppress(Exception):  # The run must become complete even if the page fails.
                self._make_page(page)
            if self._page_of is not None:
                self._send_file(page)

    def _make_page(self, page: Path) -> None:
        """Make the run's page, again only if a file has grown: that may take minutes, and counts as progress."""
        of = {name: size for name, size in self._sent.get("files", {}).items() if name != page.name}
        if of != self._page_of:
            from star_hvd.run_log.page import write_page

            self._page_of = None
            write_page(self.directory, page, self._on_progress)
            self._page_of = of

    def _send_file(self, path: Path) -> None:
        accepted = self._sent.setdefault("files", {})
        size = path.stat().st_size if path.exists() else None
        if size is not None and accepted.get(path.name) != size:
            self._client.log_artifact(self._sent["run_id"], str(path), "star")
            accepted[path.name] = size
            self._note(self._offset)
            self._on_progress()

    def _at_ms(self, time_s: float) -> int:
        return int(1e3 * (self._about["began_unix_s"] + time_s))

    def _note(self, offset: int) -> None:
        """Write the progress to `sent.json`; if that fails, some events are sent again later."""
        before = self._sent.get("offset", 0)
        self._sent["offset"] = max(offset, before)
        if offset > before:
            self._on_progress()
        with contextlib.suppress(OSError):
            layout.write_json(self.directory / layout.SENT, self._sent)


def _is_note(sent: dict[str, Any]) -> bool:
    """Whether `sent.json` has the form that `Sender` writes."""
    segments, offset, run_id = sent.get("segments", {}), sent.get("offset", 0), sent.get("run_id", "")
    whole = isinstance(segments, dict) and isinstance(sent.get("files", {}), dict) and isinstance(run_id, str)
    return whole and type(offset) is int and offset >= 0


def _active_run(client: Any, run_id: str) -> Any:
    """Return MLflow's run, None if it was deleted."""
    from mlflow.exceptions import MlflowException

    try:
        run = client.get_run(run_id)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return None
    return run if run.info.lifecycle_stage == "active" else None


def _experiment_id(client: Any, name: str, uri: str, root: Path) -> str:
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(name)
    if found is None:
        # A server has its own location for artifacts; with SQLite the default is the current directory.
        place = (root / "artifacts").resolve().as_uri() if uri.startswith("sqlite:") else None
        try:
            return str(client.create_experiment(name, artifact_location=place))
        except MlflowException:  # Another job was faster.
            found = client.get_experiment_by_name(name)
            if found is None:
                raise
    if found.lifecycle_stage == "deleted":
        # Restoring it would bring back its runs, too, which somebody did not want.
        raise ValueError(
            f"MLflow's experiment {name} was deleted; restore it with `mlflow experiments restore --experiment-id "
            f"{found.experiment_id}`, or start jobs with another MLFLOW_EXPERIMENT_NAME"
        )
    return str(found.experiment_id)
