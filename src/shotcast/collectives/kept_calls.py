"""The calls that a communicator remembers, so that a call like one before costs one look-up."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

T = TypeVar("T")
KEPT_CALLS = 4096
"""The most calls that are remembered."""


class KeptCalls(dict[Any, T], Generic[T]):
    """Calls by their arguments, resolved or prepared. To look one up leaves no trace, as that would cost every call.

    Half of them are young. When more would be, these become the old ones, and the old ones are forgotten. An old call
    that is made is young again, so a call that is made once between any 2,048 new ones is never forgotten.
    """

    __slots__ = ("_old",)

    def __init__(self) -> None:
        super().__init__()
        self._old: dict[Any, T] = {}

    def recall(self, key: Any) -> T | None:
        """Return an old call, which is young from here on; None if there is none."""
        call = self._old.pop(key, None)
        return None if call is None else self.keep(key, call)

    def keep(self, key: Any, call: T) -> T:
        """Remember a call, and return it."""
        if len(self) >= KEPT_CALLS // 2:
            self._old = dict(self)
            super().clear()
        self[key] = call
        return call

    def clear(self) -> None:
        super().clear()
        self._old.clear()
