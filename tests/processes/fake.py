"""A child of any kind, which does what it is told. FAKE_DIES: where it dies by itself."""

import os
import signal
import socket
import sys

from kvloom.processes import childlog, inside

if os.environ.get("FAKE_DIES") == "at import":
    raise SystemExit(3)


def main() -> None:
    childlog.begin(int(sys.argv[2]))
    inside.begin()
    if os.environ.get("FAKE_DIES") == "in setup":
        raise SystemExit(4)
    sock = socket.socket(fileno=int(sys.argv[1]))
    sock.send(b"ready")
    while order := sock.recv(20):
        if order == b"work":
            sock.send(b"done")
            while True:
                pass
        if order == b"write":
            os.write(2, b"x" * (1 << 20))
        elif order == b"beget" and not os.fork():
            signal.pause()
        sock.send(b"done")


if __name__ == "__main__":
    main()
