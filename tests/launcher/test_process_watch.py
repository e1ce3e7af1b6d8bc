"""The watch of processes: the end of each is told once, soon, and nothing is left behind."""

from __future__ import annotations

import dataclasses
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from shotcast.launcher.process_watch import ProcessId, ProcessWatch, _start_time, tell


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


SOON_S = 60.0
"""The longest that is waited for what has to happen."""


def id_of(process: subprocess.Popen[bytes]) -> ProcessId:
    return ProcessId(ProcessId.own().space, process.pid, _start_time(process.pid))


def threads() -> int:
    return sum(thread.name == "shotcast process watch" for thread in threading.enumerate())


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def eventually(condition: object) -> bool:
    until = time.monotonic() + SOON_S
    while not condition() and time.monotonic() < until:  # type: ignore[operator]
        time.sleep(0.005)
    return bool(condition())  # type: ignore[operator]


def test_the_end_of_a_process_is_told_soon_and_once(sleeper: subprocess.Popen[bytes]) -> None:
    watch, told, seen = ProcessWatch(), [], threading.Event()
    assert watch.add(id_of(sleeper), lambda: (told.append(time.monotonic()), seen.set())) is not None
    time.sleep(0.05)
    assert not told
    killed = time.monotonic()
    sleeper.send_signal(signal.SIGKILL)
    assert seen.wait(SOON_S)
    assert told[0] >= killed
    sleeper.wait()
    assert len(told) == 1


def test_a_stopped_process_has_not_ended(sleeper: subprocess.Popen[bytes]) -> None:
    watch, seen = ProcessWatch(), threading.Event()
    end = watch.add(id_of(sleeper), seen.set)
    sleeper.send_signal(signal.SIGSTOP)
    assert not seen.wait(0.3)
    assert end is not None
    end()


def test_a_process_that_ended_before(sleeper: subprocess.Popen[bytes]) -> None:
    process = id_of(sleeper)
    sleeper.kill()
    sleeper.wait()
    seen = threading.Event()
    assert ProcessWatch().add(process, seen.set) is not None
    assert seen.wait(SOON_S)


def test_another_process_with_the_same_number(sleeper: subprocess.Popen[bytes]) -> None:
    """The system gives numbers anew: the process that was meant has ended."""
    seen = threading.Event()
    assert ProcessWatch().add(dataclasses.replace(id_of(sleeper), started=1), seen.set) is not None
    assert seen.wait(SOON_S)


def test_a_process_of_another_machine_cannot_be_watched(sleeper: subprocess.Popen[bytes]) -> None:
    other = dataclasses.replace(id_of(sleeper), space="another machine")
    assert ProcessWatch().add(other, lambda: None) is None
    assert ProcessWatch().add(dataclasses.replace(other, space=""), lambda: None) is None


def test_several_callbacks_and_nothing_left(sleeper: subprocess.Popen[bytes]) -> None:
    gc.collect()
    watch, before = ProcessWatch(), (descriptors(), threads())
    told: list[int] = []
    for _ in range(50):
        ends = [watch.add(id_of(sleeper), lambda number=number: told.append(number)) for number in range(3)]
        assert (descriptors(), threads()) == (before[0] + 3, before[1] + 1), "one descriptor a process, one thread"
        for end in ends:
            assert end is not None
            end()
            end()
        assert eventually(lambda: (descriptors(), threads()) == before)
    watch.add(id_of(sleeper), lambda: told.append(7))
    watch.add(id_of(sleeper), lambda: told.append(8))
    sleeper.kill()
    assert eventually(lambda: sorted(told) == [7, 8])
    assert eventually(lambda: (descriptors(), threads()) == before)


def test_a_forked_child_watches_nothing_and_can_begin_anew(sleeper: subprocess.Popen[bytes]) -> None:
    from shotcast.launcher.process_watch import WATCH

    seen = threading.Event()
    WATCH.add(id_of(sleeper), seen.set)
    child = os.fork()
    if child == 0:
        told = threading.Event()
        fresh = not WATCH._descriptors
        WATCH.add(id_of(sleeper), told.set)
        os.kill(sleeper.pid, signal.SIGKILL)
        os._exit(0 if told.wait(SOON_S) and fresh else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert seen.wait(SOON_S), "the parent's watch goes on"


def test_what_a_process_tells_is_heard_with_its_token() -> None:
    watch = ProcessWatch()
    heard: list[int] = []
    gc.collect()
    before = descriptors()
    other = watch.hear("other", lambda number, _: heard.append(-number))
    end = watch.hear("token", lambda number, _: heard.append(number))
    assert threads() == 1
    program = (
        "from shotcast.launcher.process_watch import ProcessId, tell\n"
        f"to = ProcessId({ProcessId.own().space!r}, {ProcessId.own().pid}, {ProcessId.own().started})\n"
        "for number in range(30): tell(to, 'token', number)\n"
        "tell(to, 'guessed', 99)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    assert eventually(lambda: len(heard) == 30)
    assert heard == list(range(30))
    end()
    tell(ProcessId.own(), "token", 1)
    tell(ProcessId.own(), "other", 5)
    assert eventually(lambda: heard[30:] == [-5])
    other()
    assert eventually(lambda: threads() == 0)
    assert eventually(lambda: descriptors() == before)
    tell(ProcessId.own(), "token", 1)  # to nobody


def test_a_listener_hears_before_the_late_thread_of_the_watch() -> None:
    watch = ProcessWatch()
    heard: list[str] = []
    busy, go = threading.Event(), threading.Event()

    def wait(number: int, _: int) -> None:
        busy.set()
        go.wait(SOON_S)
        heard.append(f"usual {number}")

    ends = [watch.hear("usual", wait), watch.hear("soon", lambda number, _: heard.append(f"soon {number}"), True)]
    tell(ProcessId.own(), "usual", 1)
    assert busy.wait(SOON_S)
    tell(ProcessId.own(), "usual", 2)
    tell(ProcessId.own(), "soon", 3)
    watch.listen()
    assert heard == ["soon 3"]
    go.set()
    assert eventually(lambda: len(heard) == 3), "the thread calls the others for what was taken meanwhile"
    assert heard[1:] == ["usual 1", "usual 2"]
    for end in ends:
        end()
    watch.listen()  # nobody hears any more
    assert eventually(lambda: threads() == 0)


def test_a_process_is_given_files() -> None:
    watch = ProcessWatch()
    heard: list[tuple[int, int]] = []
    end = watch.hear("token", lambda number, descriptor: heard.append((number, descriptor)))
    gc.collect()
    before = descriptors()
    read, write = os.pipe()
    tell(ProcessId.own(), "token", 3, write)
    tell(ProcessId.own(), "guessed", 4, write)  # closed, as nobody takes it
    tell(ProcessId.own(), "token", 5)
    assert eventually(lambda: len(heard) == 2)
    (number, given), last = heard
    assert (number, last) == (3, (5, -1))
    os.close(write)
    os.write(given, b"word")
    os.close(given)
    assert os.read(read, 9) == b"word"
    assert os.read(read, 9) == b"", "no other end is open"
    os.close(read)
    assert eventually(lambda: descriptors() == before)
    end()


def test_a_forked_process_hears_for_itself() -> None:
    watch = ProcessWatch()
    end = watch.hear("token", lambda number, _: None)
    child = os.fork()
    if child == 0:
        heard: list[int] = []
        watch.abandon()
        watch.hear("token", lambda number, _: heard.append(number))
        tell(ProcessId.own(), "token", 7)
        os._exit(0 if eventually(lambda: heard == [7]) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    end()
    assert eventually(lambda: threads() == 0)
