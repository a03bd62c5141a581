"""A worker's client of the parameter servers: one per optimizer, with its own thread for the sockets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from star_hvd.engine.records import Snapshot
from star_hvd.errors import ChannelError
from star_hvd.ps.common.auth import Endpoint, JobKey
from star_hvd.ps.common.layout import Layout
from star_hvd.ps.common.wire import Kind
from star_hvd.ps.worker.connection import LOOK_S, Line, Push
from star_hvd.ps.worker.exchange import Exchange, Reply, StateExchange

__all__ = ["Client", "Reply"]

_NONE_SMALL: Mapping[int, bytes] = {}


class Client:
    """Pushes gradients and gets parameters. It keeps their memory; the requests and all waits are `Line`'s.

    Any thread may call the methods; only one at a time `give`, `push`, `wait` and `finish`, as a worker has one push in
    flight.

    Args:
        rank: This worker.
        optimizer_id: Number of the optimizer.
        session: As given to `ServerProcess.open`.
        endpoints: Of all shards, in order.
        layout: The layout.
        key: The job's key.
    """

    def __init__(
        self, rank: int, optimizer_id: int, session: int, endpoints: Sequence[Endpoint], layout: Layout, key: JobKey
    ) -> None:
        self.rank = rank
        self._layout = layout
        self._line = Line(rank, optimizer_id, session, endpoints, layout, key)
        self._woken = False
        self._flats: list[torch.Tensor] = []  # Parameters of the answers; from the first push on, until `release`.
        self._lent: list[torch.Tensor] = []  # Copies of what is pushed, where needed.
        # Chunks per bucket: a search among all chunks, for every bucket in every step, would be quadratic.
        self._ranges: list[list[tuple[int, int, int]]] = [[] for _ in layout.buckets]
        for chunk in layout.chunks:
            self._ranges[chunk.bucket].append((chunk.index, chunk.start, chunk.stop))
        self._begun: Push | None = None  # A push of which buffers were sent, but which is not announced yet.

    # ---- life ---------------------------------------------------------------------------------------------

    def reach(self, endpoints: Sequence[Endpoint]) -> None:
        """Set the servers, if they were not known when this client was made; call before `start`."""
        self._line.endpoints = list(endpoints)

    def start(self) -> None:
        """Connect to the servers, which need not listen yet."""
        self._line.start()

    def close(self, deadline_s: float = 5.0) -> None:
        """Disconnect; callers that wait get a `ChannelError`."""
        self._line.close(deadline_s)

    @property
    def malformed(self) -> int:
        """Invalid messages of the servers, which were dropped."""
        return self._line.malformed

    # ---- what the worker does -----------------------------------------------------------------------------

    def ranges(self, index: int) -> list[tuple[int, int, int]]:
        """Return the chunks of a bucket as (chunk index, first element, end element)."""
        return list(self._ranges[index])

    def give(self, step: int, index: int, flat: torch.Tensor, small: Mapping[int, bytes] = _NONE_SMALL) -> None:
        """Send one buffer of the push of `step` before `push` announces it. Does not block.

        If the next `give` or `push` is for another step, the unannounced push is void: the servers forget it.

        Args:
            step: As in `push`.
            index: The bucket.
            flat: Its buffer in host memory; must stay unchanged until the answer arrives.
            small: As in `push`, for this bucket.
        """
        self._line.check()
        if self._begun is None or self._begun.step != step:
            missing = torch.empty(0, device="cpu")
            flats = [missing] * len(self._layout.buckets)
            self._begun = Push(step, {}, flats, Exchange(self._layout, self._answer_buffers()))
        self._begun.flats[index] = flat
        self._begun.small.update(small)
        self._line.do("bucket", (self._begun, index))

    def push(
        self,
        *,
        step: int,
        version: int,
        flats: Sequence[torch.Tensor],
        weight: float,
        count: int = 1,
        own_steps: int = 0,
        row: Sequence[float] | None = None,
        loss: float | None = None,
        keep: bool = False,
        small: Mapping[int, bytes] = _NONE_SMALL,
    ) -> None:
        """Send a gradient without blocking; `wait` returns the answer.

        Args:
            step: This worker's own push counter, higher than in any push before.
            version: Version of the parameters the gradient was computed on.
            flats: Per bucket the sum of weight * gradient, followed by the weight, as in `Bucket.flat`.
            weight: The sum of the weights.
            count: Gradients in the sum.
            own_steps: Steps this worker has made; the hyperparameters are those of the worker present with the most.
            row: Its hyperparameters (`HyperRow.read`).
            loss: Its loss, for the log.
            keep: Whether the buffers stay unchanged until the answer arrives, so that no copy is needed.
            small: Per chunk index, what is sent instead of its part of the buffer (`star_hvd.compression.int8`).

        Raises:
            ChannelError: The previous push has no answer yet, or the client is closed.
            ValueError: The number of buffers is wrong.
        """
        self._line.check()
        if (before := self._line.push) is not None:
            raise ChannelError(f"rank {self.rank} pushed step {step} before the answer to {before.step}; call wait")
        if len(flats) != len(self._layout.buckets):
            raise ValueError(f"a push has {len(flats)} buffers; expected {len(self._layout.buckets)}")
        lent = self._borrow(flats, keep)
        meta = {
            "version": version,
            "weight": float(weight),
            "count": count,
            "own_steps": own_steps,
            "row": None if row is None else [float(number) for number in row],
            "loss": None if loss is None else float(loss),
        }
        push, self._begun = self._begun, None
        if push is None or push.step != step:
            push = Push(step, meta, lent, Exchange(self._layout, self._answer_buffers()))
        push.meta, push.flats = meta, lent
        push.small.update(small)
        self._line.send(push)

    def _borrow(self, flats: Sequence[torch.Tensor], keep: bool) -> list[torch.Tensor]:
        """Return the buffers themselves if they may be kept, otherwise copies in reused memory."""
        usable = all(flat.device.type == "cpu" and flat.is_contiguous() for flat in flats)
        if keep and usable:
            return list(flats)
        lent = self._lent = self._lent or self._new_buffers()
        for mine, flat in zip(lent, flats, strict=True):
            mine.copy_(flat[: mine.numel()])
        return lent

    def _answer_buffers(self) -> list[torch.Tensor]:
        flats = self._flats = self._flats or self._new_buffers()
        return flats

    def _new_buffers(self) -> list[torch.Tensor]:
        return [torch.empty(b.numel, dtype=b.dtype, device="cpu") for b in self._layout.buckets]

    def release(self) -> None:
        """Release the memory of answers and pushes, as none is expected any more; another push takes new memory.

        A push that was not announced is void. It holds the buffers of its answer, here and in the line.
        """
        self._flats, self._lent, self._begun = [], [], None
        self._line.do("forget", None)

    def wait(self, deadline_s: float, *, whole: bool = True) -> Reply:
        """Wait for the answer to the push.

        Args:
            deadline_s: Longest wait.
            whole: Wait for all parameters. If False, return once the push's result is known. Parameters still arrive
                in the reply's buffers, and a buffer of the push must stay unchanged until the parameters of its bucket
                are here (`wait_bucket`). Call `finish` at the end.

        Returns:
            `params`: parameters to continue with. `dropped`: the same, but the push was dropped. `moved`: the servers
            were drained; `state` gives the final state. `interrupted`: `wake` was called; the push is still in flight.

        Raises:
            DeadlineError: No answer within `deadline_s`; the push is still in flight.
            ChannelError: There was no push, the servers refused it, or the client was closed.
        """
        push = self._line.in_flight()
        push.piecewise = not whole

        def reply() -> Reply | None:
            if not whole and push.exchange.promised:
                return push.exchange.reply()  # `finish` ends the push, even if all parameters are here.
            if push.answered:
                return self._line.take_answer(push)
            if self._woken:
                self._woken = False
                return Reply("interrupted")
            return None

        found = self._line.wait(reply, push.exchange, deadline_s, "is a server dead or a rank very late?")
        if found.kind == "error":
            raise ChannelError(f"the servers refused the push of rank {self.rank}: {found.reason}")
        return found

    def wait_bucket(self, index: int, deadline_s: float) -> None:
        """Wait until all parameters of a bucket are in its buffer; for use after `wait` with `whole=False`.

        Raises:
            DeadlineError: They did not arrive within `deadline_s`.
            ChannelError: The client was closed.
        """
        if (push := self._line.push) is not None:
            self._line.wait(lambda: push.exchange.has(index), push.exchange, deadline_s)

    def finish(self, deadline_s: float) -> int:
        """Wait for all parameters and return their version; for use after `wait` with `whole=False`.

        Raises:
            DeadlineError: They did not arrive within `deadline_s`.
            ChannelError: The client was closed, or there was no push.
        """
        push = self._line.in_flight()
        self._line.wait(lambda: push.answered, push.exchange, deadline_s)
        return self._line.take_answer(push).version

    def describe(self) -> str:
        """Describe what is missing of the answer to the push, for the log."""
        push = self._line.push
        return "no push is in flight" if push is None else push.exchange.describe()

    def wake(self) -> None:
        """Interrupt the current or the next `wait`."""
        self._woken = True
        self._line.notify()

    def pull(
        self,
        deadline_s: float,
        *,
        known: int | None = None,
        empty: bool = False,
        check: Callable[[], None] = lambda: None,
        look_s: float = LOOK_S,
    ) -> Reply:
        """Get the parameters of one version, as reply `params`.

        Args:
            deadline_s: Longest wait.
            known: Version that the caller already has; if it is the newest, the reply is `known`, without parameters.
            empty: Request no parameters; the reply only shows that the servers have received what was sent before.
            check: Called during the wait; raises what makes it pointless, as that another rank's process has ended.
            look_s: Interval between these calls.

        Raises:
            DeadlineError: No complete parameters within `deadline_s`.
            ChannelError: The client was closed.
        """
        flats = self._new_buffers()
        exchange = Exchange(self._layout, flats, Kind.PULLED, known, empty)
        self._line.read(exchange, deadline_s, check, look_s)
        if exchange.mixed and not empty:
            exchange = Exchange(self._layout, flats, Kind.PULLED)
            self._line.read(exchange, deadline_s, check, look_s)
        return exchange.reply()

    def state(
        self, deadline_s: float, *, check: Callable[[], None] = lambda: None, look_s: float = LOOK_S
    ) -> Snapshot:
        """Get the parameters and optimizer state of one version; after a drain, of the final one.

        Args:
            deadline_s: Longest wait.
            check: As in `pull`.
            look_s: As in `pull`.

        Raises:
            DeadlineError: No complete state within `deadline_s`.
            ChannelError: The client was closed, or the state cannot be read.
        """
        exchange = StateExchange(self._layout)
        self._line.read(exchange, deadline_s, check, look_s)
        return exchange.snapshot()

    def absent(self, inactive: bool) -> None:
        """Announce to the servers that this worker will not push for a while, or that it pushes again."""
        self._line.do("presence", "absent" if inactive else "present")

    def replace(self, index: int, endpoint: Endpoint) -> None:
        """Connect to a shard's new process and resend what the old one may have lost."""
        self._line.do("replace", (index, endpoint))
