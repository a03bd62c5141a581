"""The parameter servers that this rank runs, and its connections to all of them."""

from __future__ import annotations

from scheduler.records import Plan
from star_hvd.channel.keys import Keyring
from star_hvd.config import Config
from star_hvd.control.messages import Message
from star_hvd.errors import StarError
from star_hvd.execute.driver import EngineDriver, Send
from star_hvd.execute.servers import Client
from star_hvd.execute.state import Snapshot

__all__ = ["ServerHouse"]


class ServerHouse:
    """See the module's text."""

    def __init__(
        self, rank: int, config: Config, keyring: Keyring, host: str, send: Send, drivers: dict[int, EngineDriver]
    ) -> None:
        self._rank = rank

    def prepare(self, engine: int, plan: Plan) -> str | None:
        return "not there yet"

    def on_message(self, message: Message) -> None:
        pass

    def client(self, engine: int, plan: Plan) -> Client:
        raise StarError("not there yet")

    def seed(self, engine: int, plan: Plan, snapshot: Snapshot) -> None:
        raise StarError("not there yet")

    def end(self, engine: int, plan: Plan, new: Plan) -> None:
        raise StarError("not there yet")

    def final_state(self, engine: int, version: int, deadline_s: float) -> Snapshot | None:
        return None

    def stop(self) -> None:
        pass
