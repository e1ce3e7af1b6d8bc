"""The management library is asked of two GPUs; a stand-in answers as NVML does."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from shotcast.hardware import nvml

READ, WRITE = 0, 1


class Library:
    """NVML of a machine with the GPUs ``a`` and ``b``.

    Args:
        statuses: the status of each ability between them; 0 is good.
        error: what the question for it returns.
    """

    def __init__(self, statuses: dict[int, int], error: int = 0):
        self.statuses, self.error = statuses, error
        self.asked: list[tuple[Any, Any]] = []

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:  # noqa: N802
        names = [b"GPU-a", b"GPU-b"]
        if uuid not in names:
            return 6  # NVML_ERROR_NOT_FOUND
        handle._obj.value = 1 + names.index(uuid)
        return 0

    def nvmlDeviceGetP2PStatus(self, gpu: Any, other: Any, ability: int, status: Any) -> int:  # noqa: N802
        self.asked.append((gpu.value, other.value))
        status._obj.value = self.statuses[ability]
        return self.error


@pytest.mark.parametrize(
    ("library", "access"),
    [
        (Library({READ: 0, WRITE: 0}), True),
        (Library({READ: 0, WRITE: 1}), False),
        (Library({READ: 4, WRITE: 0}), False),
        (Library({READ: 0, WRITE: 0}, error=3), None),
        (None, None),
    ],
)
def test_peer_access(monkeypatch: pytest.MonkeyPatch, library: Library | None, access: bool | None) -> None:
    monkeypatch.setattr(nvml, "library", lambda: library)
    assert nvml.peer_access("a", "GPU-b") is access
    if library is not None:
        assert set(library.asked) == {(1, 2)}


def test_a_gpu_that_a_container_hides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "library", lambda: Library({READ: 0, WRITE: 0}))
    assert nvml.peer_access("a", "c") is None


def test_a_machine_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert nvml.library.__wrapped__() is None
