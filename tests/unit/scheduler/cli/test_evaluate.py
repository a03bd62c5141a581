"""What a model is compared with: the champion, or the shipped model if there is none that can be used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scheduler.cli.evaluate import find_champion
from scheduler.learning.features import SCHEMA_VERSION
from scheduler.learning.predictor import ModelError
from scheduler.learning.registry import FilesMissing, Version
from tests.support.learning import save_model


class _Registry:
    """A registry whose champion is version 3, with the files of a folder."""

    def __init__(self, folder: Path, error: ModelError | None = None) -> None:
        self._folder, self._error = folder, error

    def alias(self, alias: str) -> Version:
        return Version("star-tta", "3", "run")

    def download(self, version: Version) -> Path:
        if self._error is not None:
            raise self._error
        return self._folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_model(tmp_path / "model")
    return tmp_path / "model"


def test_a_champion_of_other_features_leaves_its_place_to_the_shipped_model(folder: Path) -> None:
    """After a change of the features no champion can be loaded: nothing could ever be promoted again."""
    about = json.loads((folder / "model.json").read_text())
    (folder / "model.json").write_text(json.dumps({**about, "feature_version": 0}))
    found = find_champion(_Registry(folder), "challenger")  # type: ignore[arg-type]
    assert found is not None and found[1].about["data"]["rows"] > 10_000
    assert found[0].startswith("shipped model (champion v3 cannot be used: the model in ")
    assert f"feature_version 0; expected {SCHEMA_VERSION}" in found[0]


def test_a_damaged_or_deleted_champion_leaves_its_place_to_the_shipped_model(folder: Path) -> None:
    (folder / "low.txt").unlink()
    for registry in (_Registry(folder), _Registry(folder, FilesMissing("no model.json in /there"))):
        found = find_champion(registry, "challenger")  # type: ignore[arg-type]
        assert found is not None and found[0].startswith("shipped model (champion v3 cannot be used: ")


def test_an_outage_is_no_unusable_champion(folder: Path) -> None:
    registry = _Registry(folder, ModelError("the registry did not answer within 120 s"))
    with pytest.raises(ModelError, match="did not answer"):
        find_champion(registry, "challenger")  # type: ignore[arg-type]
