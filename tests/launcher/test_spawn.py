"""spawn: the results of ranks, and everything that can go wrong with a process."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import spawn_targets as targets
import torch

import shotcast
from shotcast import CollectiveTimeout, ConfigError, RankFailed
from shotcast.launcher import monitor, rank_process
from shotcast.launcher.spawn import RankGroup


def has_ended(pid: int) -> bool:
    """Return whether a process has ended; one that nobody has waited for yet counts as ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def children_of(*parents: int) -> list[int]:
    listed = (Path(f"/proc/{pid}/task/{pid}/children").read_text().split() for pid in parents)
    return [int(child) for children in listed for child in children]


def wait_until_gone(pid: int, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if has_ended(pid):
            return True
        time.sleep(0.02)
    return False


class TestResults:
    @pytest.mark.parametrize("world_size", [1, 2, 5])
    def test_by_rank_and_a_group_forms(self, world_size: int) -> None:
        results = shotcast.spawn(targets.call_arithmetic, world_size, 0.5)
        assert [rank for rank, _ in results] == list(range(world_size))
        expected = torch.full([4], 0.5 * sum(range(world_size)))
        assert all(torch.equal(total, expected) for _, total in results)

    def test_larger_than_a_pipe(self) -> None:
        results = shotcast.spawn(targets.big_tensor, 3, 1_000_000)
        assert [(len(t), t[-1].item()) for t in results] == [(1_000_000, 0.0), (1_000_000, 1.0), (1_000_000, 2.0)]

    def test_ranks_draw_different_numbers(self) -> None:
        assert len(set(shotcast.spawn(targets.numpy_draw, 3))) == 3

    @pytest.mark.timing
    def test_starting_is_fast_once_the_server_runs(self) -> None:
        """Eight ranks take less than four imports of torch, which each would make without the server."""
        shotcast.spawn(targets.threads, 2)

        def fast() -> bool:
            start = time.monotonic()
            subprocess.run([sys.executable, "-c", "import torch"], check=True)
            imported = time.monotonic()
            shotcast.spawn(targets.threads, 8)
            return time.monotonic() - imported < 4 * (imported - start)

        assert any(fast() for _ in range(5))


def test_a_rank_begins_with_all_loaded_that_collectives_need() -> None:
    """The server that ranks are forked from skips a module that it cannot import, without reporting it."""
    before, added = shotcast.spawn(targets.what_a_call_loads, 1)[0]
    assert {"numba.np.npyfuncs", "shotcast.transport.cpu.executor", "shotcast.collectives.communicator"} <= set(before)
    assert [name for name in added if name.startswith(("numba", "shotcast"))] == []
    assert "triton" not in before, "it reads TRITON_INTERPRET when it is imported"
    assert shotcast.spawn(gc.get_freeze_count, 1)[0] > 100_000, "its first collection would copy what the server has"


def test_the_server_goes_without_what_it_cannot_load(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An error other than ImportError would end the server, and with it every spawn."""

    def refresh(context: object) -> None:
        raise AttributeError("this numba has none")

    monkeypatch.setattr("numba.core.base.BaseContext.refresh", refresh)
    monkeypatch.delitem(sys.modules, "shotcast.transport.cpu.preload", raising=False)
    with caplog.at_level("INFO", "shotcast"):
        importlib.import_module("shotcast.transport.cpu.preload")
    assert "this numba has none" in caplog.text
    sys.modules.pop("shotcast.transport.cpu.preload")


class TestEnvironment:
    def test_is_the_callers_at_call_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        shotcast.spawn(targets.threads, 1)  # the server runs, with another environment
        monkeypatch.setenv("SHOTCAST_TEST_A", "from the caller")
        monkeypatch.setenv("SHOTCAST_TEST_B", "overridden")
        monkeypatch.delenv("HOME", raising=False)
        names = ("SHOTCAST_TEST_A", "SHOTCAST_TEST_B", "HOME")
        for seen in shotcast.spawn(targets.environment, 2, *names, env={"SHOTCAST_TEST_B": "argument"}):
            assert seen == {"SHOTCAST_TEST_A": "from the caller", "SHOTCAST_TEST_B": "argument", "HOME": None}
        assert os.environ["SHOTCAST_TEST_B"] == "overridden"

    def test_job_variables(self) -> None:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
        assert shotcast.spawn(targets.environment, 2, *names, env={"RANK": "7"}) == [
            dict(zip(names, ("0", "2", "0", "2", "127.0.0.1"), strict=True)),
            dict(zip(names, ("1", "2", "1", "2", "127.0.0.1"), strict=True)),
        ]

    def test_threads_share_the_cores_unless_set(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        assert shotcast.spawn(targets.threads, 8) == [max(1, len(os.sched_getaffinity(0)) // 8)] * 8
        assert shotcast.spawn(targets.threads, 2, env={"OMP_NUM_THREADS": "3"}) == [3, 3]

    @pytest.mark.parametrize("threads", ["", " "])
    def test_no_number_of_threads_is_none_set(self, threads: str) -> None:
        assert shotcast.spawn(targets.threads, 1, env={"OMP_NUM_THREADS": threads})[0] >= 1

    def test_streams_are_the_callers_at_call_time(self, capfd: pytest.CaptureFixture[str]) -> None:
        with capfd.disabled():
            shotcast.spawn(targets.threads, 1)  # the server has these streams
        shotcast.spawn(targets.says, 1, "heard")
        captured = capfd.readouterr()
        assert (captured.out, captured.err) == ("heard\n", "heard, too")

    def test_so_are_umask_and_cores(self) -> None:
        shotcast.spawn(targets.threads, 1)
        cores, umask = os.sched_getaffinity(0), os.umask(0o137)
        try:
            os.sched_setaffinity(0, {max(cores)})
            assert shotcast.spawn(targets.umask_and_cores, 1) == [(0o137, {max(cores)})]
        finally:
            os.umask(umask)
            os.sched_setaffinity(0, cores)

    def test_reaches_numba_that_the_server_imported_before(self) -> None:
        assert shotcast.spawn(targets.numba_setting, 1, env={"NUMBA_DISABLE_JIT": "1"}) == [True]
        assert shotcast.spawn(targets.numba_setting, 1, env={"NUMBA_DISABLE_JIT": "0"}) == [False]

    @pytest.mark.full
    def test_is_set_before_the_script_is_imported(self, tmp_path: Path) -> None:
        script = tmp_path / "script.py"
        script.write_text(
            textwrap.dedent("""
                import os
                import shotcast
                SEEN = os.environ.get("SHOTCAST_TEST_C")
                def seen():
                    return SEEN
                if __name__ == "__main__":
                    print(shotcast.spawn(seen, 2, env={"SHOTCAST_TEST_C": "early"}))
            """)
        )
        result = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=400)
        assert result.stdout.strip() == "['early', 'early']", result.stderr


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for the report of the cause, however late it comes; no rank runs on."""
    monkeypatch.setattr(monitor, "_SETTLE_S", 300.0)
    monkeypatch.setattr(monitor, "_SETTLE_TIMEOUT_S", 300.0)


class TestFailures:
    @pytest.mark.usefixtures("patient")
    def test_exception_names_the_rank_and_shows_its_traceback(self) -> None:
        with pytest.raises(RankFailed, match="the culprit's own words") as caught:
            shotcast.spawn(targets.one_raises, 3, 2)
        assert caught.value.rank == 2
        assert "in one_raises" in caught.value.detail
        assert isinstance(caught.value.__cause__, ValueError)

    @pytest.mark.usefixtures("patient")
    def test_cause_goes_before_the_timeout_it_led_to(self) -> None:
        with pytest.raises(RankFailed) as caught:
            shotcast.spawn(targets.victim_reports_first, 2)
        assert caught.value.rank == 1
        assert "ranks that failed as well: 0" in caught.value.detail

    @pytest.mark.usefixtures("patient")
    def test_a_rank_that_gave_up_goes_before_one_that_found_it_gone(self) -> None:
        with pytest.raises(RankFailed, match="missing ranks: 0") as caught:
            shotcast.spawn(targets.a_late_rank_ends_another, 2)
        assert caught.value.rank == 1

    @pytest.mark.usefixtures("patient")
    def test_killed_rank_goes_before_its_peers_broken_connections(self) -> None:
        with pytest.raises(RankFailed, match="SIGKILL") as caught:
            shotcast.spawn(targets.gloo_victim_reports_first, 2)
        assert caught.value.rank == 1

    def test_timeout_is_the_cause_when_there_is_no_other(self) -> None:
        with pytest.raises(RankFailed) as caught:
            shotcast.spawn(targets.all_time_out, 2)
        assert isinstance(caught.value.__cause__, CollectiveTimeout)

    @pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
    def test_signal_is_named(self, signum: signal.Signals) -> None:
        with pytest.raises(RankFailed, match=signum.name) as caught:
            shotcast.spawn(targets.one_is_killed, 3, 1, int(signum))
        assert caught.value.rank == 1

    @pytest.mark.parametrize(("how", "text"), [("sys.exit", r"sys\.exit\(3\)"), ("os._exit", "exited with code 3")])
    def test_exit_is_a_failure_and_ends_the_others(self, how: str, text: str) -> None:
        start = time.monotonic()
        with pytest.raises(RankFailed, match=text):
            shotcast.spawn(targets.one_exits, 2, 1, how)
        assert time.monotonic() - start < 300  # of 600

    def test_crash_on_the_way_out_is_a_failure(self) -> None:
        with pytest.raises(RankFailed, match="SIGSEGV after it had returned"):
            shotcast.spawn(targets.crashes_after_return, 2)

    def test_death_is_seen_while_what_the_rank_started_lives(self, tmp_path: Path) -> None:
        marker, start = tmp_path / "marker", time.monotonic()
        marker.touch()
        try:
            with pytest.raises(RankFailed, match="SIGKILL"):
                shotcast.spawn(targets.leaves_a_child, 2, str(marker))
            assert time.monotonic() - start < 300  # of 600
        finally:
            marker.unlink()

    def test_return_value_that_does_not_pickle(self) -> None:
        with pytest.raises(RankFailed, match="returned lock, which cannot be pickled"):
            shotcast.spawn(targets.returns_unpicklable, 2)

    def test_exception_that_does_not_pickle_keeps_its_text(self) -> None:
        with pytest.raises(RankFailed, match="TwoArguments: 1 and 2") as caught:
            shotcast.spawn(targets.raises_unpicklable, 2)
        assert caught.value.__cause__ is None

    def test_return_exceptions_lets_the_others_finish(self) -> None:
        results = shotcast.spawn(targets.one_is_killed, 3, 1, int(signal.SIGKILL), return_exceptions=True)
        assert (results[0], results[2]) == ("survived", "survived")
        assert isinstance(results[1], RankFailed)
        assert "SIGKILL" in results[1].detail

    def test_return_exceptions_holds_what_was_raised(self) -> None:
        results = shotcast.spawn(targets.victim_reports_first, 2, return_exceptions=True)
        assert [type(result) for result in results] == [CollectiveTimeout, ValueError]
        assert "victim_reports_first" in str(results[0].__cause__)


def started(culprit: int, in_compiled_code: bool, folder: Path) -> RankGroup:
    """Start two ranks, of which one hangs, and return when it does and the other is done."""
    file = folder / "pid"
    group = RankGroup.start(targets.one_hangs, 2, culprit, in_compiled_code, str(file))
    assert not monitor.wait_for_reports([group.ranks[1 - culprit]], time.monotonic() + 300, stop_at_failure=True)
    until = time.monotonic() + 300
    while not (file.exists() and file.read_text()) and time.monotonic() < until:
        time.sleep(0.02)
    return group


@pytest.mark.timing
class TestTimeout:
    def test_names_who_had_not_finished_and_where(self, tmp_path: Path) -> None:
        group = started(1, False, tmp_path)
        start = time.monotonic()
        with pytest.raises(RankFailed, match=r"not finished within 1 s: 1;") as caught:
            group.results(1)
        assert time.monotonic() - start < 100  # of 600
        assert caught.value.rank == 1
        assert "in one_hangs" in caught.value.detail

    def test_ends_a_rank_that_holds_the_interpreter_lock(self, tmp_path: Path) -> None:
        with pytest.raises(RankFailed, match="in hold_the_interpreter_lock"):
            started(0, True, tmp_path).results(3)

    @pytest.mark.full
    def test_ends_a_rank_that_ignores_sigterm(self) -> None:
        with pytest.raises(RankFailed, match=r"within 1 s: 1;"):
            shotcast.spawn(targets.one_ignores_sigterm, 2, 1, timeout_s=1)

    def test_with_return_exceptions_keeps_what_came(self, tmp_path: Path) -> None:
        results = started(1, False, tmp_path).results(1, return_exceptions=True)
        assert results[0] == "done"
        assert isinstance(results[1], RankFailed)


class TestParent:
    """The parent spawns a rank that hangs while it holds the interpreter lock; the rank must end with the parent."""

    @pytest.fixture
    def running(self, tmp_path: Path):
        pid_file = tmp_path / "pid"
        script = tmp_path / "script.py"
        script.write_text(
            textwrap.dedent(f"""
                import signal, sys
                sys.path.insert(0, {str(Path(__file__).parent)!r})
                import shotcast, spawn_targets
                if __name__ == "__main__":
                    # tests that run in the background are started with SIGINT ignored
                    signal.signal(signal.SIGINT, signal.default_int_handler)
                    shotcast.spawn(spawn_targets.one_hangs, 2, 0, True, {str(pid_file)!r})
            """)
        )
        with (tmp_path / "stderr").open("w") as stderr:
            parent = subprocess.Popen([sys.executable, script], stderr=stderr, start_new_session=True)
        deadline = time.monotonic() + 300
        while not (pid_file.exists() and pid_file.read_text()) and time.monotonic() < deadline:
            time.sleep(0.05)
        yield parent, int(pid_file.read_text())
        parent.kill()
        parent.wait()

    @pytest.mark.full
    @pytest.mark.parametrize("signum", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.full)])
    def test_ranks_die_with_a_killed_parent(self, running, signum: signal.Signals) -> None:
        parent, rank = running
        forked = children_of(*children_of(parent.pid))
        assert rank in forked
        assert len(forked) >= 2, "the rank that hangs, and the store"
        parent.send_signal(signum)
        parent.wait(200)
        assert all(wait_until_gone(pid, 200) for pid in forked)

    @pytest.mark.full
    def test_interrupt_ends_the_ranks(self, running, tmp_path: Path) -> None:
        parent, rank = running
        os.killpg(parent.pid, signal.SIGINT)  # as a terminal does: ranks get it too
        assert parent.wait(200) != 0
        assert wait_until_gone(rank, 200)
        stderr = (tmp_path / "stderr").read_text()
        assert stderr.count("KeyboardInterrupt") == 1, stderr

    @pytest.mark.parametrize("started", [False, True])
    @pytest.mark.parametrize("number", [1, 3, pytest.param(2, marks=pytest.mark.full)], ids=str)
    def test_interrupt_of_a_start(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, started: bool, number: int
    ) -> None:
        """The process may already run while only this call knows of it."""
        before = set(multiprocessing.active_children())  # shared ranks of other tests
        begun: list[Any] = []
        launch, start = rank_process._Popen._launch, rank_process.RankProcess.start

        def launched(popen: Any, process: Any) -> None:
            launch(popen, process)
            begun.append(popen.pid)
            if len(begun) == number and not started:
                raise KeyboardInterrupt

        def start_then_fail(process: Any) -> None:
            start(process)
            if len(begun) == number and started:
                raise KeyboardInterrupt

        monkeypatch.setattr(rank_process._Popen, "_launch", launched)
        monkeypatch.setattr(rank_process.RankProcess, "start", start_then_fail)
        with pytest.raises(KeyboardInterrupt) as kept:  # as an interpreter keeps what ends it, and all it refers to
            shotcast.spawn(targets.one_hangs, 2, 1, True, str(tmp_path / "pid"))
        assert kept.traceback
        assert len(begun) == number
        assert all(wait_until_gone(pid, 200) for pid in begun)
        until = time.monotonic() + 200
        while set(multiprocessing.active_children()) != before and time.monotonic() < until:
            time.sleep(0.02)  # a process has ended before the one that started it says so
        assert set(multiprocessing.active_children()) == before

    @pytest.mark.full
    def test_interrupt_while_the_server_loads(self, tmp_path: Path) -> None:
        """The server must survive, as the next call needs it."""
        script = tmp_path / "script.py"
        script.write_text(
            textwrap.dedent(f"""
                import os, signal, sys, threading, time
                sys.path.insert(0, {str(Path(__file__).parent)!r})
                import shotcast, spawn_targets
                from shotcast.launcher import rank_server

                def interrupt():
                    while rank_server.server._forkserver_pid is None:
                        time.sleep(0.01)
                    time.sleep(0.3)
                    os.killpg(0, signal.SIGINT)

                if __name__ == "__main__":
                    signal.signal(signal.SIGINT, signal.default_int_handler)
                    threading.Thread(target=interrupt).start()
                    try:
                        shotcast.spawn(spawn_targets.one_hangs, 2, 0, False)
                    except KeyboardInterrupt:
                        print(len(shotcast.spawn(spawn_targets.threads, 2)))
            """)
        )
        result = subprocess.run([sys.executable, script], capture_output=True, timeout=400, start_new_session=True)
        assert (result.returncode, result.stdout, result.stderr) == (0, b"2\n", b"")

    @pytest.mark.full
    def test_a_fork_of_the_caller_has_ranks_of_its_own_and_leaves_others_alone(self, tmp_path: Path) -> None:
        script, marker = tmp_path / "script.py", tmp_path / "marker"
        script.write_text(
            textwrap.dedent(f"""
                import atexit, os, sys
                from pathlib import Path
                sys.path.insert(0, {str(Path(__file__).parent)!r})
                import shotcast, spawn_targets
                from shotcast.launcher.spawn import RankGroup

                if __name__ == "__main__":
                    job = RankGroup.start(spawn_targets.waits_for, 1, {str(marker)!r})
                    child = os.fork()
                    if child == 0:
                        started = len(shotcast.spawn(spawn_targets.threads, 2))
                        atexit._run_exitfuncs()  # as sys.exit, but for threads that no fork has
                        os._exit(started)
                    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
                    Path({str(marker)!r}).touch()
                    print(job.wait(), job.ranks[0].value)
                    job.end()
            """)
        )
        result = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=400)
        assert (result.returncode, result.stdout) == (0, "2\nNone done\n"), result.stderr

    def test_interrupt_is_the_parents_to_handle(self) -> None:
        assert shotcast.spawn(targets.interrupted, 2) == ["went on", "went on"]


class TestMisuse:
    def test_no_function(self) -> None:
        with pytest.raises(ConfigError, match="spawn takes a function, not 'work'"):
            shotcast.spawn("work", 2)  # type: ignore[arg-type]

    def test_argument_that_cannot_be_pickled(self) -> None:
        with pytest.raises(ConfigError, match=r"^argument 'text' of says cannot be pickled: .*lock"):
            shotcast.spawn(targets.says, 2, threading.Lock())
        with pytest.raises(ConfigError, match=r"^threads with its arguments cannot be pickled: .*lock"):
            shotcast.spawn(targets.threads, 2, threading.Lock())  # which takes none

    def test_variable_that_cannot_be_pickled(self) -> None:
        count, lock = 3, threading.Lock()

        def work(number: int) -> bool:
            return lock.acquire(timeout=count + number)

        with pytest.raises(ConfigError, match=r"^variable 'lock' of .*\.work cannot be pickled: .*lock"):
            shotcast.spawn(work, 2, 1)

    def test_closure_without_cloudpickle(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("cloudpickle", "numba.cloudpickle"):
            monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(ConfigError) as caught:
            shotcast.spawn(lambda: None, 2)
        first, *advice = str(caught.value).splitlines()
        assert ".<lambda> with its arguments cannot be pickled" in first
        assert [line.split(":")[0] for line in advice] == ["Put it into a file, and import it from there", "Or"]
        assert advice[1].endswith("pip install cloudpickle")

    @pytest.mark.parametrize("world_size", [0, 2.0, "2", None])
    def test_world_size(self, world_size: Any) -> None:
        with pytest.raises(ConfigError, match=f"positive number of processes, not {world_size!r}"):
            shotcast.spawn(targets.threads, world_size)

    @pytest.mark.parametrize("timeout_s", [-1, float("nan"), "1"])
    def test_timeout(self, timeout_s: Any) -> None:
        with pytest.raises(ConfigError, match=rf"seconds \(0 or more\) or None, not {timeout_s!r}"):
            shotcast.spawn(targets.threads, 1, timeout_s=timeout_s)

    def test_no_timeout_may_be_infinity(self) -> None:
        assert len(shotcast.spawn(targets.threads, 1, timeout_s=float("inf"))) == 1

    @pytest.mark.parametrize(
        ("env", "text"),
        [
            ({"X": 1}, "environment variables must be strings; X is 1"),
            ({"OMP_NUM_THREADS": "0"}, "OMP_NUM_THREADS must be a positive number of threads, not '0'"),
            ({"OMP_NUM_THREADS": "many"}, "OMP_NUM_THREADS must be a positive number of threads, not 'many'"),
        ],
    )
    def test_environment(self, env: Any, text: str) -> None:
        with pytest.raises(ConfigError, match=text):
            shotcast.spawn(targets.threads, 1, env=env)

    @pytest.mark.full
    def test_function_that_the_script_hides_from_ranks(self, tmp_path: Path) -> None:
        script = tmp_path / "script.py"
        script.write_text("import shotcast\nif __name__ == '__main__':\n    def f(): pass\n    shotcast.spawn(f, 2)\n")
        result = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=400)
        assert "ConfigError: Can't get attribute 'f'" in result.stderr
        assert "define it above that line" in result.stderr

    @pytest.mark.full
    def test_unguarded_script_is_told_so(self, tmp_path: Path) -> None:
        script = tmp_path / "script.py"
        script.write_text("import shotcast\ndef f(): return 1\nshotcast.spawn(f, 2)\n")
        result = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=400)
        assert result.returncode == 1
        assert 'if __name__ == "__main__":' in result.stderr
        assert "start ranks without end" in result.stderr


class TestByValue:
    """Functions that ranks cannot import."""

    CODE = """
import shotcast
scale = 3
class Number:
    def __init__(self, value):
        self.value = value
class Refused(Exception):
    pass
def scaled(number):
    return Number(scale * number.value)
def refuse():
    raise Refused("by the function")
if __name__ == "__main__":
    found = shotcast.spawn(scaled, 2, Number(7))
    print([type(number) is Number and number.value for number in found])
    try:
        shotcast.spawn(refuse, 1)
    except shotcast.RankFailed as error:
        print(repr(error.__cause__))
"""
    SAYS = "[21, 21]\nRefused('by the function')\n"

    def test_closure_and_its_result(self) -> None:
        offset = 5
        (add,) = shotcast.spawn(lambda: lambda number: number + offset, 1)
        assert add(2) == 7

    @pytest.mark.full
    def test_function_and_classes_of_a_command(self) -> None:
        result = subprocess.run([sys.executable, "-c", self.CODE], capture_output=True, text=True, timeout=400)
        assert (result.stdout, result.stderr) == (self.SAYS, "")

    @pytest.mark.full
    def test_function_and_classes_typed_into_an_interpreter(self) -> None:
        code = f"exec({self.CODE!r})\n"
        result = subprocess.run([sys.executable], input=code, capture_output=True, text=True, timeout=400)
        assert (result.stdout, result.stderr) == (self.SAYS, "")

    @pytest.mark.full
    @pytest.mark.parametrize("args", [["-m", "package"], pytest.param(["package"], marks=pytest.mark.full)])
    def test_function_of_a_main_that_ranks_do_not_import(self, tmp_path: Path, args: list[str]) -> None:
        (tmp_path / "package").mkdir()
        (tmp_path / "package" / "__main__.py").write_text(self.CODE)
        result = subprocess.run([sys.executable, *args], capture_output=True, text=True, timeout=400, cwd=tmp_path)
        assert (result.stdout, result.stderr) == (self.SAYS, "")
