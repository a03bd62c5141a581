"""What an owner holds while its server is given its first state."""

from __future__ import annotations

import errno
from typing import Any

import pytest
import torch

from scheduler.plan.plan import Plan
from star_hvd.errors import ChannelError
from star_hvd.ps.common.layout import Chunk, Layout
from star_hvd.ps.common.pipe import Pipe
from star_hvd.ps.common.record import read_record
from tests.support.ps_cluster import cluster


def test_the_first_state_is_cut_when_it_is_written_to_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut before, all of it would wait in the pipe as a second copy, for a server that is slow to read."""
    cuts: list[int] = []
    waiting: list[Any] = []
    cut = Layout.cut_params

    def counted(self: Layout, params: Any, chunk: Chunk) -> torch.Tensor:
        cuts.append(chunk.index)
        return cut(self, params, chunk)

    with cluster(Plan.ps(1, 1), seed=False) as made, monkeypatch.context() as patch:
        patch.setattr(Layout, "cut_params", counted)
        patch.setattr(Pipe, "send", lambda self, message, *rest, **named: waiting.append(message))
        snapshot = made.snapshot()
        made.servers[0].seed(0, 0, snapshot)
        seeds = [message for message in waiting if callable(message)]
        assert len(seeds) == len(made.layout.chunks) > 3 and cuts == []
        for chunk, make in zip(made.layout.chunks, seeds, strict=True):
            message = make()
            assert (message["do"], message["chunk"]) == ("seed", chunk.index) and cuts[-1] == chunk.index
            data = torch.frombuffer(message["data"], dtype=torch.uint8)
            params = read_record(data, torch.empty(chunk.numel))[4]
            assert torch.equal(params, cut(made.layout, snapshot.params, chunk))


def test_a_state_that_servers_cannot_keep_is_refused_before_anything_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    with cluster(Plan.ps(1, 1), seed=False) as made, monkeypatch.context() as patch:
        sent: list[Any] = []
        patch.setattr(Pipe, "send", lambda self, message, *rest, **named: sent.append(message))
        snapshot = made.snapshot()
        snapshot.state[0]["history"] = [1, 2]
        with pytest.raises(ChannelError, match="'history' is a list"):
            made.servers[0].seed(0, 0, snapshot)
        assert not [message for message in sent if callable(message)]


def test_an_order_that_could_not_be_sent_to_a_server_that_is_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As without descriptors: the server would wait for ever for what the owner believes it has."""
    raised: list[OSError] = []

    def send(self: Pipe, *unused: Any, **named: Any) -> None:
        raise raised[-1]

    with cluster(Plan.ps(1, 1), seed=False) as made, monkeypatch.context() as patch:
        patch.setattr(Pipe, "send", send)
        raised.append(OSError(errno.EMFILE, "too many open files"))
        with pytest.raises(OSError, match="too many open files"):
            made.servers[0].member(0, 0, "absent")
        raised.append(BrokenPipeError(errno.EPIPE, "gone"))
        made.servers[0].member(0, 0, "present")


def test_an_order_to_a_server_whose_pipe_was_closed_is_left_to_the_next_one() -> None:
    with cluster(Plan.ps(1, 1), seed=False) as made:
        made.servers[0].stop()
        made.servers[0].member(0, 0, "absent")
