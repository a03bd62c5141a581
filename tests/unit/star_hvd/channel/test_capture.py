"""What somebody who reads the wire gets: neither keys nor gradients, on control, tensor and server connections."""

from __future__ import annotations

import dataclasses
import pickle
import time
from pathlib import Path

import pytest
import torch
from zmq.utils import z85

from scheduler.plan.plan import Plan
from star_hvd.channel.agent import Agent
from star_hvd.channel.keys import JobKey, KeyPair, Keyring, Peer
from star_hvd.channel.late_push import LatePushes, ParentLink
from star_hvd.channel.messages import base as m
from star_hvd.channel.state_transfer import TensorServer, fetch
from star_hvd.config import Config
from star_hvd.coordinator.coordinator import Coordinator
from star_hvd.engine.records import Snapshot
from star_hvd.ps.worker.client import Client
from tests.support.ps_cluster import DEADLINE_S, Cluster, cluster
from tests.support.tap import Tap

PATTERN = 1.2345678e-5  # Of every element of a gradient.
CLEAR = torch.full((4,), PATTERN).numpy().tobytes()

pytestmark = pytest.mark.timeout(900)


def secrets_of(*pairs: KeyPair) -> list[bytes]:
    """Secret keys as text, as a library would write them, and as bytes."""
    texts = [pair.hand_over()[1] for pair in pairs]
    return texts + [z85.decode(text) for text in texts] + [text.hex().encode() for text in texts]


def push(made: Cluster, client: Client, step: int) -> None:
    flats = [torch.full_like(flat, PATTERN) for flat in made.gradients(client.rank, step)]
    client.push(step=step, version=step, flats=flats, weight=1.0)
    assert client.wait(DEADLINE_S).version == step + 1


@pytest.mark.slow
def test_the_wire_of_servers_shows_no_key_and_no_gradient() -> None:
    with cluster(Plan.ps(1, 1), servers=2, processes=True) as made:
        taps = [Tap(each.host, each.port) for each in made.endpoints]
        ports = [dataclasses.replace(e, port=t.port) for e, t in zip(made.endpoints, taps, strict=True)]
        # A session whose workers, and whose shards among themselves, go through the taps.
        for index, server in enumerate(made.servers):
            server.open(1, 0, index, ports, made.layout, made.plan, made.spec(), 0)
            params = [torch.full_like(p, PATTERN) for p in made.ordered]
            server.seed(1, 0, Snapshot(0, params, [{} for _ in params]))
        client = Client(0, 1, 0, ports, made.layout, made.key)
        client.start()
        for step in range(3):
            push(made, client, step)
        captured = b"\0".join(tap.captured for tap in taps)
        client.close()
        for tap in taps:
            tap.close()
        # It is the whole conversation: greetings in clear, then more than three gradients there and parameters back.
        size = sum(p.numel() * 4 for p in made.ordered)
        assert captured.count(b"CURVE") >= 4 and len(captured) > 6 * size
        assert not any(secret in captured for secret in secrets_of(made.key.own, made.key.server))
        assert CLEAR not in captured and b"STPS" not in captured and b"PLAIN" not in captured


def test_without_encryption_no_key_is_used_and_only_this_user_can_connect(tmp_path: Path) -> None:
    with cluster(Plan.ps(1, 1), host=str(tmp_path)) as made:
        (endpoint,) = made.endpoints
        assert endpoint.local and endpoint.public_key == b"" and endpoint.port == 0
        assert Path(endpoint.host).is_socket() and Path(endpoint.host).parent == tmp_path
        push(made, made.clients[0], 0)


def test_the_wire_of_control_and_tensors_shows_no_key_and_no_gradient() -> None:
    rings = [Keyring(), Keyring()]
    control, control_port = rings[0].server("127.0.0.1")
    router, tensor_port = rings[0].server("127.0.0.1")
    taps = [Tap("127.0.0.1", control_port), Tap("127.0.0.1", tensor_port)]
    peers = [Peer(ring.public_key, "127.0.0.1", taps[0].port, taps[1].port) for ring in rings]
    for ring in rings:
        ring.admit(peers)
    late: list[bytearray] = []
    pushes = LatePushes(lambda engine, rank, version, body: len(late.append(body) or late))  # type: ignore[func-returns-value]
    snapshot = Snapshot(1, [torch.full((5000,), PATTERN)], [{}])
    tensors = TensorServer(router, lambda engine, state_too, least: snapshot, 1 << 14, pushes.take)
    coordinator = Coordinator(control, 2, Config(heartbeat_s=0.05))
    came: list[m.Message] = []
    agent = Agent(1, lambda: rings[1].client(0, b"1", port=peers[0].control_port), came.append, 0.05)
    for part in (tensors, coordinator, agent):
        part.start()
    try:
        agent.send(m.RequestBatch(0, 0, 10, 4, False))
        limit_s = time.monotonic() + 60.0
        while not any(isinstance(message, m.Grant) for message in came) and time.monotonic() < limit_s:
            time.sleep(0.01)
        assert any(isinstance(message, m.Grant) for message in came)
        assert fetch(rings[1], 0, 0, 60.0) is not None
        link = ParentLink(rings[1], 0, 1, 0, chunk_bytes=1 << 14, pace_bytes_per_s=0.0, deadline_s=60.0)
        link.push([torch.full((5000,), PATTERN)], 0)
        link.close()
        captured = b"\0".join(tap.captured for tap in taps)
    finally:
        agent.stop()
        coordinator.stop()
        tensors.stop()
        for tap in taps:
            tap.close()
        for ring in rings:
            ring.close()
    assert len(late) == 1 and CLEAR in late[0], "the pattern looked for is what was sent"
    assert captured.count(b"CURVE") >= 4 and len(captured) > 40_000
    pairs = [pair for ring in rings for pair in (ring.pair, ring.server_pair)]
    assert not any(secret in captured for secret in secrets_of(*pairs))
    assert CLEAR not in captured and m.encode(m.Grant(0, 0, 0, 4)) not in captured


def test_a_key_pair_shows_and_gives_away_no_secret() -> None:
    key = JobKey.new()
    secret = key.own.hand_over()[1].decode()
    assert secret not in repr(key) and secret not in repr(key.own) and secret not in str(vars(key))
    for thing in (key, key.own):
        with pytest.raises(TypeError, match="must not leave its process"):
            pickle.dumps(thing)
