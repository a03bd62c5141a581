"""Whether builds of Horovod may mix, and the comparison over the launcher's store."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from horovod.runner.http.http_server import RendezvousServer

from star_hvd import build_check, patches
from star_hvd.build_check import Build, BuildMismatchError, compare_before_init, mismatch, own_build, require_equal

PATCHED = Build("0.28.1", "patches 0001-0010 (ab12cd34)", None, "host1")
WAIT_S = 60.0


def entries(*numbers: str) -> dict[str, Any]:
    return {"horovod": "0.28.1", "patches": [{"number": number, "sha256": number * 16} for number in numbers]}


# ---- what is compared ---------------------------------------------------------------------------------------------


def test_equal_builds_on_different_hosts_may_mix() -> None:
    other = Build(PATCHED.horovod, PATCHED.patches, PATCHED.nccl, "host2")
    assert mismatch([PATCHED, other, PATCHED]) is None
    require_equal([PATCHED, other])


@pytest.mark.parametrize(
    "other",
    [
        Build("0.28.1", "no patches", None, "host2"),
        Build("0.28.1", "patches 0001-0010 (ffffffff)", None, "host2"),
        Build("0.28.1", PATCHED.patches, "2.28.9", "host2"),
        Build("0.29.0", PATCHED.patches, None, "host2"),
    ],
)
def test_different_builds_are_named_with_their_ranks_and_what_to_do(other: Build) -> None:
    with pytest.raises(BuildMismatchError) as caught:
        require_equal([PATCHED, PATCHED, other, PATCHED, other])
    message = str(caught.value)
    assert f"ranks 0-1,3 on host1: {PATCHED}" in message and f"ranks 2,4 on host2: {other}" in message
    assert "got 2 different builds" in message and "expected one" in message and "scripts/build_horovod.py" in message


def test_the_own_build_follows_the_contents_of_the_patches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches, "build_list", lambda: entries("0001", "0004"))
    first = own_build()
    assert first.patches.startswith("patches 0001-0004 (")
    changed = entries("0001", "0004")
    changed["patches"][1]["sha256"] = "0" * 64
    monkeypatch.setattr(patches, "build_list", lambda: changed)
    assert own_build().digest != first.digest
    monkeypatch.setattr(patches, "build_list", lambda: {**entries("0001", "0004"), "build": {"nccl": "2.28.9"}})
    assert own_build().digest != first.digest and own_build().nccl == "2.28.9"


def test_a_horovod_of_another_make_has_a_build_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches, "build_list", dict)
    assert own_build().patches == "no patches" and own_build().horovod == patches.horovod_release()


# ---- before Horovod starts ----------------------------------------------------------------------------------------


@pytest.fixture
def environ() -> Iterator[dict[str, str]]:
    """What the launcher tells a rank, with a store as it has one."""
    server = RendezvousServer()
    port = server.start()
    server.init([])
    address = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port)}
    yield {**address, "HOROVOD_SIZE": "3", "HOROVOD_GLOO_TIMEOUT_SECONDS": str(WAIT_S)}
    server.stop()


def ranks_compare(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], builds: list[Build]) -> list[str | None]:
    """What each rank raises, in threads instead of processes."""
    raised: list[str | None] = [None] * len(builds)
    mine = threading.local()
    monkeypatch.setattr(build_check, "own_build", lambda: mine.build)

    def rank(number: int) -> None:
        mine.build = builds[number]
        try:
            compare_before_init({**environ, "HOROVOD_RANK": str(number)})
        except BuildMismatchError as error:
            raised[number] = str(error)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(len(builds))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * WAIT_S)
        assert not thread.is_alive()
    return raised


def test_equal_builds_pass(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]) -> None:
    assert ranks_compare(monkeypatch, environ, [PATCHED] * 3) == [None] * 3


def test_all_ranks_raise_the_same(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]) -> None:
    plain = Build("0.28.1", "no patches", None, "host2")
    first, *others = ranks_compare(monkeypatch, environ, [PATCHED, plain, PATCHED])
    assert first is not None and "rank 1 on host2: Horovod 0.28.1 with no patches" in first
    assert others == [first, first]


def test_a_rank_that_says_nothing_is_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]
) -> None:
    environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] = "0.3"
    assert ranks_compare(monkeypatch, environ, [PATCHED, PATCHED]) == [None, None]


@pytest.mark.parametrize(
    "change",
    [{"HOROVOD_ELASTIC": "1"}, {"HOROVOD_SIZE": "1"}, {"HOROVOD_GLOO_RENDEZVOUS_ADDR": ""}],
)
def test_nothing_is_asked_where_nothing_can_be_known(
    monkeypatch: pytest.MonkeyPatch,
    environ: dict[str, str],
    change: dict[str, str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as store:
        store.setblocking(False)
        environ |= change | {"HOROVOD_GLOO_RENDEZVOUS_PORT": str(store.getsockname()[1]), "HOROVOD_RANK": "0"}
        with caplog.at_level("DEBUG", "star_hvd"):
            compare_before_init(environ)
        with pytest.raises(BlockingIOError):  # The store was not asked.
            store.accept()
    assert caplog.text == "", "nothing was tried"


def test_a_store_that_does_not_answer_decides_nothing(
    environ: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("DEBUG", "star_hvd"):
        compare_before_init({**environ, "HOROVOD_GLOO_RENDEZVOUS_PORT": "1", "HOROVOD_RANK": "1"})
    assert "compared after the start only" in caplog.text, "it was asked"
