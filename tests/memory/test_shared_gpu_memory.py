"""Memory of GPUs that processes share, against a stand-in for the driver: what is asked for, and what is undone."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from typing import Any

import pytest

from shotcast.memory import driver
from shotcast.memory.driver import SharedMemory

HANDLE, ADDRESS, DESCRIPTOR, NBYTES = 77, 1 << 45, 9, 4 << 20

UNDOES = {"cuMemRelease": "handle", "cuMemAddressFree": "address", "cuMemUnmap": "mapping"}


class Driver:
    """A driver that notes what is held; the function named ``failing`` returns an error."""

    def __init__(self, failing: str = "") -> None:
        self.failing, self.held, self.calls = failing, set[str](), list[str]()

    def __getattr__(self, name: str) -> Any:
        def function(*arguments: Any) -> int:
            self.calls.append(name)
            if name == self.failing:
                return 2
            if name in ("cuMemCreate", "cuMemImportFromShareableHandle"):
                arguments[0]._obj.value = HANDLE
                self.held.add("handle")
            elif name == "cuMemAddressReserve":
                arguments[0]._obj.value = ADDRESS
                self.held.add("address")
            elif name == "cuMemMap":
                assert (arguments[0].value, arguments[1].value, arguments[3].value) == (ADDRESS, NBYTES, HANDLE)
                self.held.add("mapping")
            elif name == "cuMemSetAccess":
                access = arguments[2]._obj
                assert (access.location.kind, access.location.number, access.flags) == (1, 3, 3)
            elif name == "cuMemExportToShareableHandle":
                arguments[0]._obj.value = DESCRIPTOR
            elif name in ("cuMemRelease", "cuMemAddressFree", "cuMemUnmap"):
                self.held.remove(UNDOES[name])
            elif name == "cuGetErrorString":
                arguments[1]._obj.value = b"out of memory"
            return 0

        return function


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[Driver], Driver]:
    class Stream:
        def current(self) -> Any:
            return contextlib.nullcontext()

    def install(made: Driver) -> Driver:
        monkeypatch.setattr(driver, "library", lambda: made)
        monkeypatch.setattr(driver, "side_stream", lambda index: Stream())
        return made

    return install


def test_memory_is_made_and_given_back(use: Any) -> None:
    made = use(Driver())
    memory = SharedMemory(3, NBYTES)
    assert (memory.address, memory.descriptor) == (ADDRESS, DESCRIPTOR)
    assert made.held == {"address", "mapping"}, "the mapping keeps the memory"
    memory.release()
    assert made.held == set()


def test_memory_of_another_process_is_mapped(use: Any) -> None:
    made = use(Driver())
    memory = SharedMemory(3, NBYTES, 5)
    assert (memory.address, memory.descriptor) == (ADDRESS, -1)
    assert "cuMemCreate" not in made.calls
    memory.release()
    assert made.held == set()


@pytest.mark.parametrize(
    "failing",
    ["cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess", "cuMemExportToShareableHandle"],
)
def test_what_fails_leaves_nothing_behind(failing: str, use: Any) -> None:
    made = use(Driver(failing))
    with pytest.raises(RuntimeError, match="taking 4194304 bytes of GPU 3 failed: out of memory"):
        SharedMemory(3, NBYTES)
    assert made.held == set()


def test_what_cannot_be_mapped(use: Any) -> None:
    made = use(Driver("cuMemImportFromShareableHandle"))
    with pytest.raises(RuntimeError, match="mapping memory of another process failed"):
        SharedMemory(3, NBYTES, 5)
    assert made.held == set()


def test_structures_are_as_long_as_those_of_the_driver() -> None:
    """``sizeof`` of CUmemAllocationProp and CUmemAccessDesc in cuda.h of CUDA 13."""
    assert ctypes.sizeof(driver._AllocationProperties) == 32
    assert ctypes.sizeof(driver._Access) == 12
