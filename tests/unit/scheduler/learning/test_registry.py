"""The registry: a model goes in and comes out the same, aliases move, and nothing waits for a server for long."""

from __future__ import annotations

import os
import shutil
import socket
import threading
import time
from pathlib import Path

import pytest

from scheduler.cli import main
from scheduler.learning import dataset
from scheduler.learning.features import SCHEMA_VERSION
from scheduler.learning.model_choice import find_ranker
from scheduler.learning.predictor import HEADS, ModelError, Predictor, load
from scheduler.learning.registry import (
    CHALLENGER,
    CHAMPION,
    FilesMissing,
    Registry,
    Version,
    fetch,
    find_model,
    tracking_uri,
)
from tests.support.extras import needs
from tests.support.learning import save_model, small_table

pytestmark = [pytest.mark.slow, needs("mlflow")]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], Path]:
    """Environment with a registry that has a model, and the model's folder."""
    root = tmp_path_factory.mktemp("registry")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW")}
    environ["STAR_LOG_DIR"] = str(root / "logs")
    about = save_model(root / "model")
    registry = Registry(environ)
    version = registry.record(root / "model", about, sample=small_table().head(3))
    assert version.number == "1" and registry.alias(CHALLENGER) == version and registry.alias(CHAMPION) is None
    registry.promote(version, {"regret": 0.04, "coverage": 0.9})
    registry.log(version, {"promote/regret/learned": 0.04})
    assert registry.alias(CHAMPION) == version
    return environ, root / "model"


@pytest.mark.timeout(900)
def test_what_goes_in_comes_out(stored: tuple[dict[str, str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    environ, folder = stored
    found = fetch("models:/star-tta@champion", environ, deadline_s=100.0)
    assert found != folder
    for name in [*(f"{head}.txt" for head in HEADS), "model.json"]:
        assert (found / name).read_bytes() == (folder / name).read_bytes()
    told: list[str] = []
    monkeypatch.setattr("scheduler.learning.registry.FETCH_S", 100.0)  # A busy machine takes its time to import MLflow.
    assert isinstance(find_ranker({**environ, "STAR_MODEL": "models:/star-tta/1"}, told.append), Predictor)
    assert told == []


@pytest.mark.timeout(900)
def test_mlflow_can_serve_it_and_knows_its_schema(stored: tuple[dict[str, str], Path]) -> None:
    environ, folder = stored
    import mlflow

    mlflow.set_tracking_uri(tracking_uri(environ))
    served = mlflow.pyfunc.load_model("models:/star-tta@challenger")
    rows = small_table().head(4)
    answers = served.predict(rows)
    expected = load(folder).estimate(rows[served.metadata.signature.inputs.input_names()].to_numpy(dtype="float64"))
    assert answers["middle"].to_numpy() == pytest.approx(expected.middle)
    with pytest.raises(mlflow.exceptions.MlflowException, match="noise_log"):
        served.predict(rows.drop(columns=["noise_log"]))
    version = mlflow.MlflowClient().get_model_version("star-tta", "1")
    assert version.tags["star.feature_version"] == str(SCHEMA_VERSION) and version.tags["star.coverage"] == "0.9"
    run = mlflow.get_run(version.run_id)
    assert run.data.metrics["promote/regret/learned"] == 0.04, "what it was judged by, beside its training"
    assert "coverage" in run.data.metrics and run.data.params["settings.rounds"] == "40"


@pytest.mark.timeout(900)
def test_a_model_that_is_not_there_costs_one_warning(stored: tuple[dict[str, str], Path]) -> None:
    told: list[str] = []
    assert find_ranker({**stored[0], "STAR_MODEL": "models:/star-tta@nobody"}, told.append) is None
    assert len(told) == 1 and "models:/star-tta@nobody" in told[0] and "The cost model decides" in told[0]


class Down:
    """A client whose server answers with one error."""

    def __init__(self, code: int) -> None:
        self._code = code

    def __call__(self, **uris: str) -> Down:
        return self

    def fail(self, *args: object) -> None:
        import mlflow

        raise mlflow.exceptions.MlflowException("some reason", error_code=self._code)

    get_model_version_by_alias = set_model_version_tag = set_registered_model_alias = fail


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("RESOURCE_DOES_NOT_EXIST", True), ("INVALID_PARAMETER_VALUE", True), ("INTERNAL_ERROR", False),
        ("TEMPORARILY_UNAVAILABLE", False), ("PERMISSION_DENIED", False), ("ENDPOINT_NOT_FOUND", False),
    ],
)
def test_an_outage_is_no_missing_champion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, absent: bool
) -> None:
    import mlflow
    from mlflow.protos.databricks_pb2 import ErrorCode

    monkeypatch.setattr(mlflow, "MlflowClient", Down(ErrorCode.Value(code)))
    registry = Registry({"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db"})
    if absent:
        assert registry.alias(CHAMPION) is None
    else:
        with pytest.raises(ModelError, match="says: some reason; check MLFLOW_TRACKING_URI"):
            registry.alias(CHAMPION)
    with pytest.raises(ModelError, match="some reason"):
        registry.promote(Version("star-tta", "1", "run"), {"regret": 0.1})
    with pytest.raises(ModelError, match="some reason"):
        registry.promote(Version("star-tta", "1", "run"), {})


def test_a_server_that_hangs_is_given_up() -> None:
    """It takes the connection and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=lambda: server.accept(), daemon=True).start()
        environ = {**os.environ, "MLFLOW_TRACKING_URI": f"http://127.0.0.1:{server.getsockname()[1]}"}
        begin_s = time.monotonic()
        with pytest.raises(ModelError, match="did not answer within 1 s"):
            fetch("models:/star-tta@champion", environ, deadline_s=1.0)
        assert time.monotonic() - begin_s < 120.0  # Of a child that is killed, on a machine that is busy.


def test_a_file_that_is_no_database_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow passes on the error of SQLAlchemy."""
    pytest.importorskip("sqlalchemy")
    for name in ("MLFLOW_HTTP_REQUEST_TIMEOUT", "MLFLOW_HTTP_REQUEST_MAX_RETRIES"):
        monkeypatch.setenv(name, "10")  # So that what is set is undone.
    (tmp_path / "bad.db").write_text("no database")
    environ = {"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path / 'bad.db'}"}
    with pytest.raises(ModelError, match="(?s)file is not a database.*; check MLFLOW_TRACKING_URI"):
        Registry(environ).alias("champion")


def test_where_models_are_looked_for() -> None:
    assert tracking_uri({"MLFLOW_TRACKING_URI": "http://server"}) == "http://server"
    assert tracking_uri({"STAR_LOG_DIR": "/somewhere"}) == "sqlite:////somewhere/mlflow.db"


@pytest.mark.timeout(900)
def test_deleted_files_are_told_from_a_version_that_is_not_there(tmp_path: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW")}
    environ["STAR_LOG_DIR"] = str(tmp_path / "logs")
    about = save_model(tmp_path / "model")
    registry = Registry(environ)
    version = registry.record(tmp_path / "model", about, sample=small_table().head(3))
    shutil.rmtree(tmp_path / "logs/artifacts")
    with pytest.raises(FilesMissing, match=r"models:/star-tta/1 cannot be fetched .*no model\.json"):
        registry.download(version)
    with pytest.raises(ModelError, match="not found") as absent:
        registry.download(Version("star-tta", "77", "run"))
    assert not isinstance(absent.value, FilesMissing)


def test_a_folder_without_a_model_is_told(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no model\.json"):
        find_model(tmp_path)


@pytest.mark.timeout(900)
def test_runs_in_mlflow_become_rows_to_train_on(
    stored: tuple[dict[str, str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow

    from scheduler.learning.logged_rows import mlflow_rows
    from scheduler.plan.plan import Plan
    from tests.unit.scheduler.cli.test_main import logged

    environ = {**stored[0], "MLFLOW_EXPERIMENT_NAME": "some jobs"}
    with pytest.raises(ValueError, match="no experiment some jobs"):
        mlflow_rows(environ, "1")
    mlflow.set_tracking_uri(tracking_uri(environ))
    mlflow.create_experiment("some jobs", artifact_location=str(tmp_path / "artifacts"))
    logged(tmp_path, "a", Plan.sync(4), reached_s=10.0)
    logged(tmp_path, "b", Plan.partial(4, 3), reached_s=5.0)
    mlflow.set_experiment("some jobs")
    for name in ("a", "b"):
        with mlflow.start_run(tags={"star.kind": "job"}):
            mlflow.log_artifacts(str(tmp_path / name), "star")
    with mlflow.start_run(tags={"star.kind": "job"}):
        pass  # A job whose files never came.
    with mlflow.start_run(tags={"star.kind": "job"}) as broken:
        mlflow.log_artifacts(str(tmp_path / "a"), "star")
    download = mlflow.MlflowClient.download_artifacts

    def fails_for_one(self: object, run_id: str, *arguments: object) -> object:
        if run_id == broken.info.run_id:
            raise ConnectionError("no such bucket")
        return download(self, run_id, *arguments)

    monkeypatch.setattr(mlflow.MlflowClient, "download_artifacts", fails_for_one)
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_TIMEOUT", raising=False)
    told: list[str] = []
    rows = mlflow_rows(environ, "1", report=told.append)
    assert told[0] == "2 of 4 runs used" and {row[0] for row in rows} == {"real"}
    assert sorted(line.partition(": ")[2] for line in told[1:]) == [
        "MLflow has no files of it; call `star-hvd sync-logs` on its hosts",
        "its files cannot be downloaded: ConnectionError: no such bucket",
    ]
    assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "10"
    monkeypatch.undo()

    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    dataset.write(tmp_path / "t.csv.gz", small_table())
    assert main.main(["train", "t.csv.gz", "--mlflow", "--out", "model", "--no-registry"]) == 0
    assert load(tmp_path / "model").about["data"]["sources"]["real"] == len(rows)
