"""Ranks as forked processes, for tests of parts below the Communicator. They end with the test, however it ends."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from shotcast.errors import CollectiveTimeout

_CONTEXT = multiprocessing.get_context("fork")
DEAD = "dead"
"""The result of a rank that was killed or left out."""


class LocalGroup:
    """A HostGroup over pipes: rank 0 collects from every other rank and answers."""

    def __init__(self, rank: int, world_size: int, pipes: dict[int, Connection]):
        self.rank, self.world_size, self._pipes = rank, world_size, pipes
        self.calls = 0

    def all_gather(self, value: Any, timeout_s: float | None = None) -> list[Any]:
        self.calls += 1
        timeout_s = 100.0 if timeout_s is None else timeout_s
        if self.rank:
            self._pipes[0].send(value)
            return self._receive(0, timeout_s)
        values = [value] + [self._receive(peer, timeout_s) for peer in range(1, self.world_size)]
        for pipe in self._pipes.values():
            pipe.send(values)
        return values

    def barrier(self, timeout_s: float | None = None) -> None:
        self.all_gather(None, timeout_s)

    def _receive(self, peer: int, timeout_s: float) -> Any:
        if self._pipes[peer].poll(timeout_s):
            try:
                return self._pipes[peer].recv()
            except EOFError:
                pass
        raise CollectiveTimeout(self.rank, [peer], "all_gather", self.calls, timeout_s)


def _main(function: Callable[..., Any], rank: int, pipes: list[Any], results: list[Any], arguments: Any) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: do not outlive a killed pytest
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    import torch

    torch.set_num_threads(1)
    mine: dict[int, Connection] = {}
    for peer, (hub, spoke) in enumerate(pipes, start=1):
        if rank == 0:
            mine[peer] = hub
            spoke.close()
        elif peer == rank:
            mine[0] = spoke
            hub.close()
        else:
            hub.close()
            spoke.close()
    for other, (_, sender) in enumerate(results):
        if other != rank:
            sender.close()
    # Garbage of the test process is not collected here: files that it holds would close while a test counts its own.
    gc.freeze()
    try:
        outcome = (True, function(LocalGroup(rank, len(results), mine), *arguments))
    except BaseException:
        outcome = (False, traceback.format_exc())
    results[rank][1].send(outcome)
    # Skip exit handlers, which belong to the test process.
    os._exit(0)


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *arguments: Any,
    timeout_s: float = 300.0,
    meddle: Callable[[list[int]], None] | None = None,
    mortal: bool = False,
) -> list[Any]:
    """Run ``function(group, *arguments)`` on every rank, and return the results by rank.

    Raises AssertionError with the traceback of a rank that failed. ``meddle`` is called with the process ids. With
    ``mortal``, a rank that dies yields DEAD.
    """
    pipes = [_CONTEXT.Pipe() for _ in range(1, world_size)]
    results = [_CONTEXT.Pipe(duplex=False) for _ in range(world_size)]
    processes = [
        _CONTEXT.Process(target=_main, args=(function, rank, pipes, results, arguments), daemon=True)
        for rank in range(world_size)
    ]
    try:
        for process in processes:
            process.start()
        for ends in (*pipes,):
            for end in ends:
                end.close()
        for _, sender in results:
            sender.close()
        if meddle is not None:
            meddle([process.pid for process in processes])
        outcomes: dict[int, Any] = {}
        until = time.monotonic() + timeout_s
        while len(outcomes) < world_size:
            waiting = {results[rank][0]: rank for rank in range(world_size) if rank not in outcomes}
            ready = wait(list(waiting), max(0.0, until - time.monotonic()))
            assert ready, f"ranks {sorted(waiting.values())} did not finish within {timeout_s} s; had {outcomes}"
            for receiver in ready:
                rank = waiting[receiver]
                try:
                    good, value = receiver.recv()
                except EOFError:
                    good, value = mortal, DEAD
                assert good, f"rank {rank} failed:\n{value}"
                outcomes[rank] = value
        return [outcomes[rank] for rank in range(world_size)]
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
        for process in processes:
            if process.pid is not None:
                process.join(100)
        for receiver, _ in results:
            receiver.close()
