"""Stands in for a rank or launcher that the fork server runs: `python -S stub.py MODULE ARGUMENT...`.

See `forkserver.py`. It imports little, so that it starts immediately.
"""

import array
import json
import os
import signal
import socket
import struct
import sys


def main(words: list[str]) -> None:
    """Have the process forked, forward signals to it, and end as it ends."""
    held = (signal.SIGTERM, signal.SIGINT)
    signal.pthread_sigmask(signal.SIG_BLOCK, held)
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(os.environ["TEST_FORK_SERVER"])
        request = {"words": words, "environment": dict(os.environ), "folder": os.getcwd()}
        text = json.dumps(request).encode()
        namespaces = [os.open(f"/proc/self/ns/{name}", os.O_RDONLY) for name in ("net", "mnt")]
        descriptors = array.array("i", [0, 1, 2, *namespaces])
        server.sendmsg([struct.pack("<q", len(text))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])
        server.sendall(text)
        rank = receive(server)
        for number in held:
            signal.signal(number, lambda given, _: os.kill(rank, given))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, held)
        status = receive(server)
    if status < 0:
        signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
        os.kill(os.getpid(), -status)
    sys.exit(status)


def receive(server: socket.socket) -> int:
    """Return the next number from the server."""
    data = b""
    while len(data) < 8:
        more = server.recv(8 - len(data))
        if not more:
            sys.exit("the server that forks ranks is gone")
        data += more
    return int(struct.unpack("<q", data)[0])


if __name__ == "__main__":
    main(sys.argv[1:])
