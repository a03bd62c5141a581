"""A proxy between a client and a server that records every byte in both directions."""

from __future__ import annotations

import contextlib
import socket
import threading

__all__ = ["Tap"]


class Tap:
    """Listens on a port of its own and forwards to another.

    Args:
        host: Host of both.
        port: Port to which connections are forwarded.
    """

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._listener = socket.create_server((host, 0), backlog=64)
        self.port = int(self._listener.getsockname()[1])
        self._streams: list[bytearray] = []
        self._ends: list[socket.socket] = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def captured(self) -> bytes:
        """Return all recorded bytes, stream by stream."""
        return b"\0".join(bytes(stream) for stream in list(self._streams))

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, (address, _) = self._listener.accept()
                far = socket.create_connection(self._target, source_address=(address, 0))
                self._ends += [near, far]
                for source, sink in ((near, far), (far, near)):
                    stream = bytearray()
                    self._streams.append(stream)
                    threading.Thread(target=self._pass_on, args=(source, sink, stream), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, stream: bytearray) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                stream += data
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close all connections."""
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
