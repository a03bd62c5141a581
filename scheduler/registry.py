"""Models in MLflow's registry: put there, named champion and challenger, fetched with a deadline.

MLflow is imported in the process of `star-scheduler` and in a child process of a training job, never in the job itself:
the import alone takes seconds, and a server that hangs would hold the job up.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from scheduler.predictor import ModelError

__all__ = ["CHALLENGER", "CHAMPION", "FETCH_S", "MODEL_NAME", "fetch", "tracking_uri"]

MODEL_NAME = "star-tta"
CHAMPION, CHALLENGER = "champion", "challenger"

FETCH_S = 20.0
"""What a training job waits for the registry at its start, at most: two imports of MLflow on a busy machine."""


def tracking_uri(environ: Mapping[str, str]) -> str:
    """`MLFLOW_TRACKING_URI`, else the SQLite file `mlflow.db` in `STAR_LOG_DIR`, `training_logs` by default."""
    root = Path(environ.get("STAR_LOG_DIR") or "training_logs").resolve()
    return environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{root / 'mlflow.db'}"


def fetch(uri: str, environ: Mapping[str, str], *, deadline_s: float = FETCH_S) -> Path:
    """Download a model from the registry into a folder of this user's cache.

    Args:
        uri: `models:/NAME@ALIAS` or `models:/NAME/VERSION`.
        environ: The environment, for the tracking URI and the cache.
        deadline_s: Seconds until it is given up; the child process is killed then.

    Returns:
        The folder with `model.json`.

    Raises:
        ModelError: Not there, no answer in time, or MLflow is not installed.
    """
    target = Path(tempfile.mkdtemp(prefix="star-model-"))
    command = [sys.executable, "-m", "scheduler.registry", uri, str(target), tracking_uri(environ)]
    env = {**environ, "MLFLOW_HTTP_REQUEST_TIMEOUT": "5", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}
    package = str(Path(__file__).resolve().parent.parent)
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
        raise ModelError(f"{uri} cannot be fetched from {tracking_uri(environ)}: {lines[-1]}")
    return Path(done.stdout.strip().splitlines()[-1])


def find_model(folder: Path) -> Path:
    """The folder with `model.json` inside of what was downloaded.

    Raises:
        ModelError: There is none.
    """
    found = sorted(folder.rglob("model.json"))
    if not found:
        raise ModelError(f"no model.json in {folder}; expected a model that `star-scheduler train` registered")
    return found[0].parent


def _main(arguments: list[str]) -> int:
    """The child process: download and print the folder."""
    uri, target, tracking = arguments
    try:
        import mlflow

        mlflow.set_tracking_uri(tracking)
        path = mlflow.artifacts.download_artifacts(artifact_uri=uri, dst_path=target)
        print(find_model(Path(path)))
    except Exception as error:
        # MLflow raises whatever its stores raise; the parent shows the last line.
        text = " ".join(str(error).split())[:300]
        sys.stderr.write(f"{type(error).__name__}: {text}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
