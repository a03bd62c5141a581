"""Models in MLflow's registry: registered, given the aliases champion and challenger, fetched with a deadline.

MLflow is imported in `star-scheduler` and in a child process of a training job, never in the job itself: the import
takes seconds, and a server that hangs would block the job.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scheduler.child_process import module_command
from scheduler.learning.features import FEATURES, SCHEMA_VERSION
from scheduler.learning.predictor import ModelError, load
from scheduler.mlflow_limits import limit_requests, request_errors
from scheduler.redact import redacted

__all__ = [
    "CHALLENGER",
    "CHAMPION",
    "FETCH_S",
    "MODEL_NAME",
    "FilesMissing",
    "Registry",
    "Version",
    "fetch",
    "tracking_uri",
]

MODEL_NAME = "star-tta"
CHAMPION, CHALLENGER = "champion", "challenger"

EXPERIMENT = "star-scheduler"

_ABSENT = ("INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST")
"""MLflow's codes for a registered model without the alias, and for no such model."""

_NO_FILES = 3
"""Exit status of the child process if the artifact store was reached and does not have the model's files."""

FETCH_S = 20.0
"""Longest wait of a starting training job for the registry: two imports of MLflow on a busy machine."""


def tracking_uri(environ: Mapping[str, str]) -> str:
    """`MLFLOW_TRACKING_URI`, else the SQLite file `mlflow.db` in `STAR_LOG_DIR`, `training_logs` by default."""
    root = Path(environ.get("STAR_LOG_DIR", "").strip() or "training_logs").resolve()
    return environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{root / 'mlflow.db'}"


class FilesMissing(ModelError):
    """The registry answers and has the version, but not its files; they were deleted, for example."""


@dataclass(frozen=True, slots=True)
class Version:
    """A registered model.

    Attributes:
        name: Name of the registered model.
        number: Its version.
        run_id: MLflow run that trained it.
    """

    name: str
    number: str
    run_id: str


class Registry:
    """MLflow operations of `star-scheduler`. Imports MLflow, so only for processes that do not train.

    Args:
        environ: The environment, for the tracking URI.
        name: Name of the registered model.

    Raises:
        ModelError: MLflow is not installed, or rejects the tracking URI.
    """

    def __init__(self, environ: Mapping[str, str], name: str = MODEL_NAME) -> None:
        limit_requests()
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        try:
            import mlflow
        except ImportError:
            raise ModelError("MLflow is missing; install the extra `train`: pip install 'star-hvd[train]'") from None
        self.uri = tracking_uri(environ)
        if self.uri.startswith("sqlite:///"):
            Path(self.uri[len("sqlite:///") :]).parent.mkdir(parents=True, exist_ok=True)
        self.name = name
        self._environ = environ
        logging.getLogger("mlflow").setLevel(logging.ERROR)
        self._mlflow: Any = mlflow
        with self._telling():
            mlflow.set_tracking_uri(self.uri)
            mlflow.set_registry_uri(self.uri)
            self._client = mlflow.MlflowClient(tracking_uri=self.uri, registry_uri=self.uri)

    def record(
        self,
        folder: Path,
        about: Mapping[str, Any],
        *,
        sample: Any,
        figures: Sequence[Path] = (),
    ) -> Version:
        """Log a training and register its model as challenger.

        Args:
            folder: The model.
            about: Contents of its `model.json`.
            sample: A pandas table with a few rows of feature columns, for the signature.
            figures: Plots to log.

        Raises:
            ModelError: MLflow rejected a request or cannot be reached.
        """
        with self._telling(), warnings.catch_warnings():
            # MLflow recommends type hints and examples; there is a signature.
            warnings.simplefilter("ignore", UserWarning)
            return self._record(folder, about, sample, figures)

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """Turn MLflow's errors into a `ModelError` that says what to do."""
        try:
            yield
        except request_errors() as error:
            text = f"MLflow at {self.uri} says: {error}; check MLFLOW_TRACKING_URI and the server, and try again"
            raise ModelError(redacted(text, self._environ)) from None

    def _record(self, folder: Path, about: Mapping[str, Any], sample: Any, figures: Sequence[Path]) -> Version:
        mlflow = self._mlflow
        estimates = load(folder).estimate(sample[list(FEATURES)].to_numpy(dtype="float64"))
        import pandas

        answers = pandas.DataFrame(
            {name: getattr(estimates, name) for name in ("low", "middle", "high", "reach", "known")}
        )
        if self._client.get_experiment_by_name(EXPERIMENT) is None:
            self._client.create_experiment(EXPERIMENT, artifact_location=self._artifacts())
        mlflow.set_experiment(EXPERIMENT)
        with mlflow.start_run() as run:
            mlflow.set_tags({"star.kind": "training", "star.feature_version": SCHEMA_VERSION})
            mlflow.log_params({f"settings.{key}": value for key, value in about["settings"].items()})
            mlflow.log_params({f"data.{key}": str(value)[:500] for key, value in about["data"].items()})
            mlflow.log_metrics({key: float(value) for key, value in about["metrics"].items()})
            for figure in figures:
                mlflow.log_artifact(str(figure), "plots")
            info = mlflow.pyfunc.log_model(
                name="model",
                python_model=str(Path(__file__).with_name("mlflow_model.py")),
                artifacts={"star": str(folder)},
                signature=mlflow.models.infer_signature(sample[list(FEATURES)], answers),
                registered_model_name=self.name,
                pip_requirements=["star-hvd", "lightgbm", "numpy", "pandas"],
            )
            version = Version(self.name, str(info.registered_model_version), run.info.run_id)
        tags = {"feature_version": str(SCHEMA_VERSION), "data_sha256": str(about["data"].get("sha256", ""))}
        for key, value in tags.items():
            self._client.set_model_version_tag(self.name, version.number, f"star.{key}", value)
        self._client.set_registered_model_alias(self.name, CHALLENGER, version.number)
        return version

    def _artifacts(self) -> str | None:
        """Location of artifacts: beside an SQLite file, else the server's default."""
        if not self.uri.startswith("sqlite:///"):
            return None
        return str(Path(self.uri[len("sqlite:///") :]).parent / "artifacts")

    def alias(self, alias: str) -> Version | None:
        """The version with an alias, or None if the registry has no such model or alias.

        Raises:
            ModelError: The registry cannot be asked, so an outage does not pass for a missing champion.
        """
        with self._telling():
            try:
                found = self._client.get_model_version_by_alias(self.name, alias)
            except self._mlflow.exceptions.MlflowException as error:
                if error.error_code in _ABSENT:
                    return None
                raise
        return Version(self.name, str(found.version), str(found.run_id))

    def promote(self, version: Version, metrics: Mapping[str, float]) -> None:
        """Make a version the champion, and tag it with the metrics of the comparison.

        Raises:
            ModelError: MLflow rejected a request or cannot be reached.
        """
        with self._telling():
            for key, value in metrics.items():
                self._client.set_model_version_tag(self.name, version.number, f"star.{key}", f"{value:.6g}")
            self._client.set_registered_model_alias(self.name, CHAMPION, version.number)

    def log(self, version: Version, metrics: Mapping[str, float]) -> None:
        """Add metrics to the run that trained a version.

        Raises:
            ModelError: MLflow rejected a request or cannot be reached.
        """
        with self._telling():
            for key, value in metrics.items():
                self._client.log_metric(version.run_id, key, float(value))

    def download(self, version: Version) -> Path:
        """Download a version by its number, since an alias may have moved; returns its folder.

        Raises:
            FilesMissing: Its files are gone.
            ModelError: It cannot be fetched.
        """
        return fetch(f"models:/{version.name}/{version.number}", self._environ, deadline_s=120.0)


def fetch(uri: str, environ: Mapping[str, str], *, deadline_s: float | None = None) -> Path:
    """Download a model from the registry into a folder that is removed when this process ends.

    Args:
        uri: `models:/NAME@ALIAS` or `models:/NAME/VERSION`.
        environ: The environment, for the tracking URI; `MLFLOW_REGISTRY_URI` is not used.
        deadline_s: Seconds after which the child process is killed; `FETCH_S` by default.

    Returns:
        The folder with `model.json`.

    Raises:
        FilesMissing: The registry answered, but the model's files are gone.
        ModelError: The model does not exist, the registry did not answer in time, or MLflow is not installed.
    """
    deadline_s = FETCH_S if deadline_s is None else deadline_s
    target = Path(tempfile.mkdtemp(prefix="star-model-"))
    atexit.register(shutil.rmtree, target, ignore_errors=True)
    command = module_command("scheduler.learning.registry", uri, str(target))
    # Not among the arguments, which all users of the machine can read: it may contain a password.
    location = tracking_uri(environ)
    # The registry is where the runs are, as for `Registry`: jobs must find what `star-scheduler` registered.
    env = {**environ, "MLFLOW_TRACKING_URI": location, "MLFLOW_REGISTRY_URI": location}
    env |= {"MLFLOW_HTTP_REQUEST_TIMEOUT": "5", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}
    package = str(Path(__file__).resolve().parents[2])
    env["PYTHONPATH"] = os.pathsep.join(part for part in (package, environ.get("PYTHONPATH", "")) if part)
    try:
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=deadline_s, stdin=subprocess.DEVNULL, check=False
        )
    except subprocess.TimeoutExpired:
        raise ModelError(f"the registry did not answer within {deadline_s:.0f} s; is MLFLOW_TRACKING_URI up?") from None
    except OSError as error:
        raise ModelError(f"cannot start a process to fetch the model: {error}") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        kind = FilesMissing if done.returncode == _NO_FILES else ModelError
        raise kind(redacted(f"{uri} cannot be fetched from {location}: {lines[-1]}", environ))
    return Path(done.stdout.strip().splitlines()[-1])


def find_model(folder: Path) -> Path:
    """Find the folder with `model.json` in a download.

    Raises:
        FilesMissing: There is none.
    """
    found = sorted(folder.rglob("model.json"))
    if not found:
        raise FilesMissing(f"no model.json in {folder}; expected a model that `star-scheduler train` registered")
    return found[0].parent


def _main(arguments: list[str]) -> int:
    """The child process: download and print the folder."""
    uri, target = arguments
    try:
        import mlflow

        mlflow.set_tracking_uri(tracking_uri(os.environ))
        path = mlflow.artifacts.download_artifacts(artifact_uri=uri, dst_path=target)
        print(find_model(Path(path)))
    except Exception as error:
        # MLflow passes on any error of its stores; the parent shows the last line.
        text = redacted(" ".join(str(error).split()))[:300]
        sys.stderr.write(f"{type(error).__name__}: {text}\n")
        return _NO_FILES if isinstance(error, FilesMissing) else 1
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
