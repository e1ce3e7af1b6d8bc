"""Agreement, through a key-value store, on a number that no earlier attempt of these ranks had.

Ranks do not count attempts themselves. A rank may be a process that replaced another, or may have missed an attempt
that others gave up, so its count would differ. Rank 0 takes the number from a counter in the store, and the ranks
confirm it:

1. Each rank writes the random token of its attempt to ``here/RANK``.
2. Rank 0 writes the number to ``invited/TOKEN`` of each rank, again whenever a rank arrives with another token.
3. Each rank writes ``accepted/NUMBER/RANK``, again whenever it is invited with another number.
4. Once all have accepted, rank 0 writes to ``invited/TOKEN`` that the number is final.
5. Each rank clears ``here/RANK``. Once all have, rank 0 is done: its next attempt finds no trace of this one.

Invitations to the token of a killed process go unanswered until its successor writes another. The counter and
``here/RANK`` stay in the store; other keys stay only if a rank dies or gives up. Tokens and numbers are never reused,
so stale keys cannot be mistaken. No rank reads a key that another may delete, since that would block.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Sequence

import torch.distributed as dist

from shotcast.memory.members import Members, WaitLog, departed, wait_text

_HOLDS = "holds "
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0002, 0.02
_LOOK_S = 0.25
"""Interval between checks for ended processes."""


def agreed_number(
    store: dist.Store,
    members: Members,
    world_size: int,
    timeout_s: float,
    what: str = "construction",
    ended: Callable[[], Sequence[int]] = tuple,
    left: Callable[[], Collection[int]] = tuple,
) -> int:
    """Return a number from 0 up that is the same on all ranks. Collective.

    The store must not be used for anything else. ``ended`` returns the ranks that will not arrive, which are not waited
    for, and ``left`` the ones among them whose processes are still alive. Raises CollectiveTimeout naming the ranks
    that did not arrive, or that ended or left meanwhile.
    """
    rank = members.rank
    token = secrets.token_hex(8)
    store.set(f"here/{rank}", token)

    def text(waited_s: float) -> str:
        return wait_text(members, _missing(store, -1, world_size), what, 0, waited_s, timeout_s)

    deadline = _Deadline(time.monotonic() + timeout_s, ended, text)
    if rank == 0:
        number = store.add("numbers", 1) - 1
        missing = _lead(store, number, world_size, deadline)
    else:
        number, agreed = _follow(store, rank, token, deadline)
        missing = [] if agreed else _missing(store, number, world_size)
        if missing:
            store.delete_key(f"invited/{token}")
    if missing:
        guilty, reason = departed(deadline.dead, left()) if deadline.dead else (missing, "late")
        raise members.timeout(guilty, what, 0, timeout_s, reason)
    return number


class _Deadline:
    """The time until which ranks wait for each other, unless one of their processes has ended.

    ``text`` names what is awaited, to follow a number of seconds. ``until`` is a ``time.monotonic`` value. ``dead`` are
    the ranks whose end stopped the wait.
    """

    def __init__(self, until: float, ended: Callable[[], Sequence[int]], text: Callable[[float], str]):
        self._until, self._ended, self._looked = until, ended, time.monotonic()
        self._begun, self._text, self._log = self._looked, text, WaitLog()
        self.dead: list[int] = []

    def passed(self) -> bool:
        now = time.monotonic()
        if now - self._looked > _LOOK_S:
            self._looked = now
            self.dead = list(self._ended())
            self._log.look(now - self._begun, lambda: self._text(now - self._begun))
        return bool(self.dead) or now > self._until


def _missing(store: dist.Store, number: int, world_size: int) -> list[int]:
    """Return the ranks that did not arrive, or else the ones that did not accept ``number``; -1 for no invitation."""
    others = range(1, world_size)
    here = {rank: f"here/{rank}" for rank in range(world_size)}
    absent = [rank for rank, key in here.items() if not (store.check([key]) and store.get(key))]
    silent = [rank for rank in others if number >= 0 and not store.check([f"accepted/{number}/{rank}"])]
    return absent or silent or [0]


def _lead(store: dist.Store, number: int, world_size: int, deadline: _Deadline) -> list[int]:
    """Invite the other ranks until all have accepted ``number``; return the missing ranks, if any."""
    others = range(1, world_size)
    here, accepted = [f"here/{rank}" for rank in others], [f"accepted/{number}/{rank}" for rank in others]
    invited: list[str] = []

    def tokens() -> list[str]:
        return [token.decode() for token in store.multi_get(here)]

    def all_accept() -> bool:
        nonlocal invited
        if not store.check(here):
            return False
        found = tokens()
        if "" in found:
            return False
        if found != invited:
            invited = found
            for token in found:
                store.set(f"invited/{token}", str(number))
        return store.check(accepted)

    def none_is_here() -> bool:
        return not set(tokens()) & set(invited)

    if others:
        if not _poll(all_accept, deadline):
            return _missing(store, number, world_size)
        for token in invited:
            store.set(f"invited/{token}", f"{_HOLDS}{number}")
        if not _poll(none_is_here, deadline):
            return [rank for rank, token in zip(others, tokens(), strict=True) if token in invited]
        for key in accepted:
            store.delete_key(key)
    store.set("here/0", "")
    return []


def _follow(store: dist.Store, rank: int, token: str, deadline: _Deadline) -> tuple[int, bool]:
    """Accept invitations until one is final; return the last number, -1 for none, and whether it is final."""
    key, number = f"invited/{token}", -1

    def holds() -> bool:
        nonlocal number
        if not store.check([key]):
            return False
        text = store.get(key).decode()
        offered = int(text.removeprefix(_HOLDS))
        if offered != number:
            number = offered
            store.set(f"accepted/{number}/{rank}", "")
        return text.startswith(_HOLDS)

    if not _poll(holds, deadline):
        return number, False
    store.set(f"here/{rank}", "")
    store.delete_key(key)
    return number, True


def _poll(reached: Callable[[], bool], deadline: _Deadline) -> bool:
    """Return True once ``reached`` does, and False if the deadline passes first."""
    pause = _FIRST_PAUSE_S
    while not reached():
        if deadline.passed():
            return False
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)
    return True
