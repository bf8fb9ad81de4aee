"""The rank process's loop, on a thread: what it does beside running batches."""

import contextlib
import socket
import threading

from kvloom.contract.capacity import AHEAD, Ahead
from kvloom.contract.config import EngineConfig
from kvloom.contract.lifecycle import Ready
from kvloom.contract.messages import Batch, Done, NewSeq, RankMessage, RankSetup, Transfer, Work
from kvloom.contract.sampling import SamplingParams
from kvloom.processes.channel import Channel
from kvloom.rank import main as rank


def test_the_memory_ahead_follows_the_highest_block_in_use(monkeypatch):
    used: list[int] = []

    class Pages:
        def __init__(self, layers, num_blocks: int, ahead: Ahead) -> None:
            assert (len(layers), num_blocks, ahead) == (1, 64, AHEAD)

        def use(self, block: int) -> None:
            used.append(block)

    monkeypatch.setattr(rank, "PagesAhead", Pages)
    here, there = socket.socketpair()
    thread = threading.Thread(target=_serve_until_closed, args=(there,))
    thread.start()
    with here:
        channel = Channel(here, RankMessage)
        channel.send(RankSetup(EngineConfig(backend="fake", num_blocks=64, max_seq_len=512), [0]))
        while not isinstance(channel.receive(), Ready):
            pass
        first = Batch([NewSeq(1, [5] * 20, SamplingParams(), 1)], [Work(1, 0, 20, 0, [7, 40])], [])
        for batch in (first, Batch([], [], [], loads=[Transfer(1, [3, 50], [b"a", b"b"])]), Batch([], [], [1])):
            channel.send(batch)
            assert isinstance(channel.receive(), Done)
    thread.join()
    assert used == [40, 50, 0]


def _serve_until_closed(sock: socket.socket) -> None:
    with sock, contextlib.suppress(EOFError):
        rank.serve(sock)
