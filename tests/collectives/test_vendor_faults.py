"""Calls of the vendor library that cannot complete: the error names the ranks at fault, in time, and a reset helps.

Nine ranks are more than native kernels serve, so nothing but the library connects them.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import vendor_fault_targets as targets
from hypothesis import given, settings
from hypothesis import strategies as st

import shotcast
from shotcast.collectives.call_watch import CallWatch
from shotcast.collectives.registry import registered
from shotcast.collectives.vendor import blame
from shotcast.collectives.vendor.blame import Blame
from shotcast.collectives.vendor.gloo import GlooGroup
from shotcast.collectives.vendor.interface import Begun, CallError, Connected
from shotcast.collectives.vendor.vendor import Vendor
from shotcast.errors import RankFailed
from shotcast.hardware.nodes import NodeLayout
from shotcast.memory.host_group import StoreGroup
from shotcast.memory.members import Members
from shotcast.wire import CallPlan, HeaderWords, Op

SOON_S = 60.0
"""The longest that an error takes on a busy machine, where the deadline is later by far or much shorter."""
INTERPRETED = {"SHOTCAST_CPU_KERNELS": "interpreter", "TRITON_INTERPRET": "1"}


def names(outcome: dict[str, Any], ranks: tuple[int, ...], reason: str = "late") -> bool:
    found = outcome["class"], outcome["missing"], outcome["reason"]
    return found == ("CollectiveTimeout", ranks, reason)


@pytest.mark.timing
class TestWithoutOwnKernels:
    @pytest.mark.full
    def test_a_late_rank(self) -> None:
        results = shotcast.spawn(targets.late_for_each_operation, 9, 1, timeout_s=300)
        for rank, seen in enumerate(results):
            for name, outcome in seen.items():
                assert names(outcome, (1,)), (rank, name, outcome)
                assert outcome["took"] < 0.5 + SOON_S, (rank, name, outcome)
        assert len(results[0]) == 8
        assert "message" not in results[2]

    def test_different_calls(self) -> None:
        for rank, seen in enumerate(shotcast.spawn(targets.different_calls, 9, 4, timeout_s=300)):
            for outcome, fields in zip(seen, (("op", "nbytes"), ("dtype",), ("nbytes",), ("reduction",)), strict=True):
                assert outcome["class"] == "CollectiveMismatch", rank
                assert outcome["differing"] == (4,)
                assert outcome["fields"] == fields
                assert outcome["took"] < SOON_S, (rank, outcome)

    def test_a_message_meets_a_collective(self) -> None:
        for rank, outcome in enumerate(shotcast.spawn(targets.meets_a_message, 9, 3, timeout_s=300)):
            assert outcome["class"] == "CollectiveMismatch", (rank, outcome)
            assert outcome["differing"] == (3,)

    def test_a_killed_rank_is_named_at_once(self) -> None:
        results = shotcast.spawn(targets.killed, 9, 4, timeout_s=300, return_exceptions=True)
        assert isinstance(results.pop(4), RankFailed)
        for outcome in results:
            assert names(outcome, (4,), "dead"), outcome
            assert outcome["took"] < SOON_S

    def test_a_killed_rank_of_another_host(self) -> None:
        """No process of another host can be watched: its connections say that it has ended."""
        results = shotcast.spawn(targets.killed_elsewhere, 9, 4, timeout_s=300, return_exceptions=True)
        assert isinstance(results.pop(4), RankFailed)
        for outcome in results:
            assert names(outcome, (4,), "dead"), outcome
            assert outcome["took"] < SOON_S

    def test_an_interrupted_rank(self) -> None:
        results = shotcast.spawn(targets.interrupted, 9, 4, timeout_s=300)
        kind, took, _ = results.pop(4)
        assert kind == "KeyboardInterrupt"
        assert took < SOON_S
        for kind, took, _ in results:
            assert kind == "interrupted (4,)"
            assert took < SOON_S
        for _, _, after in results:
            assert names(after, (4,), "interrupted")


@pytest.mark.timing
class TestBesideOwnKernels:
    def test_a_handler_that_raises_inside_the_library(self) -> None:
        env = {"SHOTCAST_CHECK_VENDOR": "0"}
        (other, waited), (own, took) = shotcast.spawn(targets.ended_by_a_handler, 2, env=env, timeout_s=300)
        assert (other, own) == ("interrupted (1,)", "")
        assert took < SOON_S
        assert waited < SOON_S

    @pytest.mark.full
    def test_a_rank_stopped_inside_the_library(self) -> None:
        results = shotcast.spawn(targets.stopped_inside, 3, 1, timeout_s=300)
        for rank, outcome in enumerate(results):
            assert names(outcome, (1,)), (rank, outcome)
            assert rank == 1 or outcome["took"] < 0.6 + SOON_S

    @pytest.mark.full
    def test_kernels_behind_a_call_that_failed_are_ended(self) -> None:
        """They would wait for the rank at fault until a deadline of their own, and say that it was that of another."""
        for seen, stopped in shotcast.spawn(targets.kernels_behind_the_library, 2, 1, env=INTERPRETED, timeout_s=300):
            assert stopped
            assert all(names(outcome, (1,)) for outcome in seen[:2]), seen
            assert "not made" in seen[2]["text"]

    def test_an_interrupted_kernel(self) -> None:
        seen, executor = shotcast.spawn(targets.interrupted_kernel, 2, env=INTERPRETED, timeout_s=300)[0]
        assert executor == "TritonExecutor"
        assert names(seen, (0,), "interrupted"), seen
        assert seen["took"] < SOON_S
        assert "all_reduce" in seen["text"]

    def test_a_rank_that_is_interrupted_tells_those_that_wait_for_it(self) -> None:
        seen = shotcast.spawn(targets.interrupted_elsewhere, 2, env=INTERPRETED, timeout_s=300)[0]
        assert names(seen, (1,), "interrupted"), seen
        assert seen["took"] < SOON_S

    def test_a_fault_that_comes_during_a_check(self) -> None:
        for seen in shotcast.spawn(targets.a_fault_that_comes_during_a_check, 2, env=INTERPRETED, timeout_s=300):
            assert names(seen, (1,)), seen

    def test_calls_that_are_not_compared(self) -> None:
        env = {"SHOTCAST_CHECK_VENDOR": "0"}
        results = shotcast.spawn(targets.absent_at_the_connection, 3, 1, env=env, timeout_s=300)
        for rank in (0, 2):
            assert names(results[rank], (1,)), results[rank]
            assert results[rank]["took"] < 2 + SOON_S


HEADERS = st.sampled_from([HeaderWords(1 << 47 | 8, 5), HeaderWords(1 << 47 | 16, 5), None])
REPORTS = st.dictionaries(st.integers(0, 5), st.tuples(HEADERS, st.booleans()), min_size=1)


PATIENT = {"_PATIENCE_S": 300.0, "_ANSWER_S": 400.0, "_ALL_ANSWERS_S": 400.0}
"""Constants of verdicts that need no patience: all ranks report, or the cause is known otherwise."""


class TestBlame:
    @settings(max_examples=60)
    @given(reports=REPORTS, gone=st.sets(st.integers(0, 5)), late=st.integers(0, 5), in_time=st.booleans())
    def test_all_ranks_get_one_verdict(
        self, reports: dict[int, tuple[HeaderWords | None, bool]], gone: set[int], late: int, in_time: bool
    ) -> None:
        """Compare the verdict with the rules; a late rank, before or after the decision, gets the same one."""
        store, members = dist.HashStore(), range(6)
        verdicts: dict[int, Any] = {}

        def report(rank: int, header: HeaderWords | None, interrupted: bool, waited_s: float = 1e5) -> None:
            verdicts[rank] = Blame(store, rank, gone).verdict(members, header, waited_s, "other", interrupted)

        interrupting = [rank for rank, (_, interrupted) in reports.items() if interrupted]
        came = {rank: reports[rank] for rank in interrupting[:1] or reports if rank != late}
        if not came:
            return
        for rank, (header, interrupted) in came.items():
            if rank in gone:  # its process has ended since
                facts = {"header": header, "begun": time.time() - 1e5, "cause": "other", "interrupted": interrupted}
                store.compare_set("alarm", "", repr(time.time()))
                store.set(f"report/{rank}", json.dumps(facts))
        alive = {rank: what for rank, what in came.items() if rank not in gone}
        threads = [threading.Thread(target=report, args=(rank, *what)) for rank, what in alive.items()]
        ticks = itertools.count()

        def monotonic() -> float:
            """Let patience end once all have reported that will."""
            return float(next(ticks)) if all(store.check([f"report/{rank}"]) for rank in came) else -1.0

        clock = types.SimpleNamespace(time=time.time, sleep=time.sleep, monotonic=monotonic)
        patient = mock.patch.multiple(blame, time=clock, _ANSWER_S=1e6, _ALL_ANSWERS_S=1e6)
        with patient:
            for thread in threads:
                thread.start()
            while in_time and not store.check(["alarm"]):
                time.sleep(0.001)
            for thread in threads if not in_time else ():
                thread.join()
            report(late, None, False, 0.0)
            for thread in threads:
                thread.join()
        found = verdicts[late]
        assert all(each[:2] == found[:2] for each in verdicts.values())
        absent = {*members} - {*came}
        known = {rank: header for rank, (header, _) in came.items() if header is not None}
        if interrupting and interrupting[0] in came:
            assert found[:2] == ("interrupted", tuple(interrupting[:1]))
        elif absent & gone:
            assert found[:2] == ("dead", tuple(sorted(absent & gone)))
        elif len(set(known.values())) > 1:
            assert found.reason == "mismatch"
            assert 0 < len(found.ranks) <= len(known) / 2
        else:
            assert found[:2] == ("late", tuple(sorted(absent)))
        assert Blame(store, 0, gone).raised()

    def test_nobody_is_at_fault_if_all_are_in_the_call(self) -> None:
        store, found = dist.HashStore(), []
        header = HeaderWords(1 << 47 | 8, 5)

        def report(rank: int) -> None:
            found.append(Blame(store, rank, ()).verdict(range(3), header, 1e5)[:2])

        threads = [threading.Thread(target=report, args=(rank,)) for rank in range(3)]
        with mock.patch.multiple(blame, **PATIENT):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert found == [("library", ())] * 3

    @pytest.mark.timing
    def test_a_slow_store_is_not_a_silent_one(self) -> None:
        """All answers take longer than a silent store is waited for, and each of them is there in time."""
        store = dist.HashStore()

        def slow(name: str) -> Callable[..., Any]:
            def answer(*arguments: Any) -> Any:
                time.sleep(0.1)
                return getattr(store, name)(*arguments)

            return answer

        loaded: Any = types.SimpleNamespace(**{name: slow(name) for name in ("check", "get", "compare_set")})
        begun = time.monotonic()
        with mock.patch.multiple(blame, _PATIENCE_S=1.5, _ANSWER_S=1.5):
            assert Blame(loaded, 0, ()).verdict(range(3), HeaderWords(1 << 47 | 8, 5), 1.0)[:2] == ("late", (1, 2))
        assert time.monotonic() - begun > 1.6, "longer than a silent store is waited for"

    @pytest.mark.timing
    def test_a_store_that_does_not_answer_is_not_waited_for(self) -> None:
        """It does not answer when the process that holds it is the one that is stopped."""
        answers = threading.Event()

        def wait(*_: Any) -> None:
            answers.wait(200)

        silent: Any = types.SimpleNamespace(check=wait, compare_set=wait)
        one = Blame(silent, 0, ())
        begun = time.monotonic()
        assert not one.raised()
        assert time.monotonic() - begun < SOON_S
        threads = threading.active_count()
        for _ in range(50):
            assert not one.raised()
        assert threading.active_count() == threads, "no more threads wait"
        one._heard -= 300
        asked = time.monotonic()
        with (
            mock.patch.multiple(blame, _ANSWER_S=300.0, _ALL_ANSWERS_S=600.0),
            pytest.raises(blame.SilentStoreError, match="may be stopped"),
        ):
            one.verdict(range(2), None, 1.0)
        assert time.monotonic() - asked < SOON_S, "the time since the first question counts"
        answers.set()

    @pytest.mark.timing
    def test_a_rank_that_was_stopped_during_a_look_still_asks(self) -> None:
        """The time of the stop is not the store's: it has some time for the answer to a new question."""
        store, held = dist.HashStore(), threading.Event()
        for rank in range(2):
            store.set(f"report/{rank}", "")
        store.set("verdict", '{"reason": "late", "ranks": [2], "headers": {}}')

        def check(keys: list[str]) -> bool:
            if keys == ["alarm"]:
                held.wait(200)
            return store.check(keys)

        slow: Any = types.SimpleNamespace(check=check, get=store.get, compare_set=store.compare_set)
        late = Blame(slow, 2, ())
        assert not late.raised()
        time.sleep(blame._ANSWER_S)
        with mock.patch.object(blame, "_LOOK_S", SOON_S):
            assert late.verdict(range(3), None, 0.0)[:2] == ("late", (2,))
        held.set()

    def test_no_verdict_where_the_cause_is_known_otherwise(self) -> None:
        store = dist.HashStore()
        assert Blame(store, 1, ()).verdict((0, 1), None, 0.0, "elsewhere", settled=lambda: True).reason == "library"
        assert not store.check(["verdict"])

    def test_nothing_is_raised_at_first(self) -> None:
        assert not Blame(dist.HashStore(), 0, ()).raised()


class TestGloo:
    def test_a_call_that_is_given_up_leaves_no_threads_and_files(self) -> None:
        store, groups = dist.HashStore(), dict[int, GlooGroup]()

        def held() -> tuple[int, int]:
            return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

        failed = threading.Event()

        def interrupted() -> None:
            if failed.is_set():
                raise CallError("another rank failed")

        def connect(rank: int) -> None:
            groups[rank] = GlooGroup(store, rank, 2, 300.0, 300.0, interrupted)

        before = held()
        threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        plan, x = CallPlan(Op.ALL_REDUCE, "vendor", "float32", 12), torch.ones(3)
        failed.set()
        began = time.monotonic()
        with pytest.raises(CallError, match="another rank failed"):
            groups[0].run(plan, x, x)
        groups.pop(0).stop()
        assert time.monotonic() - began < SOON_S, "to stop is not to wait for the call"
        groups.pop(1).stop()
        until = time.monotonic() + SOON_S
        while held() > before and time.monotonic() < until:
            time.sleep(0.02)
        assert held() <= before


class Device:
    """A group whose calls run on a device: the test says how far they are."""

    library = "nccl"

    def __init__(self) -> None:
        self.begun = self.ended = self.stops = self.made = 0
        self.trouble: CallError | None = None

    def progress(self) -> tuple[int, int]:
        return self.begun, self.ended

    def stop(self) -> None:
        self.stops += 1
        self.ended = self.begun  # the kernels of an aborted call end

    def check(self) -> None:
        if self.trouble is not None:
            raise self.trouble

    def run(self, *_: Any) -> None:
        self.made += 1


class TestCallsOnADevice:
    """The watch and calls that a GPU has begun and not ended."""

    @pytest.fixture
    def parts(self) -> Any:
        store, gone, faults, alarms = dist.HashStore(), set[int](), list[int](), list[int]()
        host: Any = object.__new__(StoreGroup)
        host.rank, host.world_size, host.gone, host.layout = 0, 2, gone, NodeLayout.one_node(2)
        host.members, host.left = Members(0), ()
        host._store = store
        cpu = torch.device("cpu")
        listen = lambda: None  # noqa: E731
        peers: Any = types.SimpleNamespace(alarmed=-1, alarm=alarms.append, listen=listen)
        vendor = Vendor(host, cpu, registered(), 0.2, "gloo", False, lambda: bool(faults), peers)
        device: Any = Device()
        known = Connected(device, (0, 1), 0)
        vendor._connected[0, 1] = known
        names = {"gone": gone, "faults": faults, "store": store, "known": known, "peers": peers, "alarms": alarms}
        return types.SimpleNamespace(vendor=vendor, device=device, **names)

    def look(self, parts: Any, limit_s: float) -> float:
        """Look as the watch does until a fault is found. Return the seconds that it took, or ``limit_s``."""
        begun = time.monotonic()
        while (waited := time.monotonic() - begun) < limit_s and not parts.vendor.failed:
            parts.vendor.look(time.monotonic())
            time.sleep(0.005)
        return min(waited, limit_s)

    def test_a_call_that_progresses_is_left_alone(self, parts: Any) -> None:
        now = time.monotonic()
        for _ in range(4):
            parts.device.begun += 1
            for _ in range(3):  # less than the deadline each, more together
                now += 0.05
                parts.vendor.look(now)
            parts.device.ended += 1
        assert self.look(parts, 0.3) == 0.3
        parts.vendor.check()
        assert parts.device.stops == 0

    def test_a_late_rank_makes_no_call_that_others_gave_up(self, parts: Any) -> None:
        """Its library may have what the call needs: it would succeed on this rank alone."""
        x, plan = torch.ones(2), CallPlan(Op.ALL_REDUCE, "vendor", "float32", 8)
        parts.vendor.run(plan, x, x)
        parts.peers.alarmed = 0
        with pytest.raises(shotcast.CollectiveTimeout):
            parts.vendor.run(plan, x, x)
        assert parts.device.made == 1
        parts.vendor.reset(1)
        assert parts.alarms == [0]
        parts.vendor._connected[0, 1] = parts.known
        parts.vendor.run(plan, x, x)
        assert parts.device.made == 2, "the alarm was of the connections before"

    def test_results_of_a_call_that_another_rank_has_aborted_are_not_taken(self, parts: Any) -> None:
        """Kernels of NCCL that are aborted send what they have, and calls of other ranks end with that."""
        x, plan = torch.ones(2), CallPlan(Op.ALL_REDUCE, "vendor", "float32", 8)
        parts.vendor.run(plan, x, x)
        parts.vendor.check()
        parts.peers.listen = lambda: setattr(parts.peers, "alarmed", 0)  # its word has come, and nobody has read it
        with pytest.raises(shotcast.CollectiveTimeout):
            parts.vendor.check()

    def test_others_are_told_before_calls_are_aborted(self, parts: Any) -> None:
        parts.peers.alarm = lambda _: parts.alarms.append(parts.device.stops)
        parts.device.begun = 1
        assert self.look(parts, SOON_S) < SOON_S
        assert (parts.alarms, parts.device.stops) == ([0], 1)

    def test_the_deadline(self, parts: Any) -> None:
        parts.device.begun = 1
        parts.known.recent.append(Begun("all_to_all", 1, HeaderWords(1 << 47 | 8, 5), 0.2))
        assert 0.19 < self.look(parts, SOON_S) < SOON_S
        with pytest.raises(shotcast.CollectiveTimeout, match="all_to_all") as caught:
            parts.vendor.check()
        assert (caught.value.missing, caught.value.reason, caught.value.epoch) == ((1,), "late", 1)
        assert parts.device.stops == 1

    def test_a_changed_deadline(self, parts: Any) -> None:
        parts.device.set_timeout = lambda timeout_s: None
        parts.vendor.set_timeout(60)
        parts.device.begun = 1
        assert self.look(parts, 0.5) == 0.5

    def test_each_call_has_the_deadline_that_it_was_made_with(self, parts: Any) -> None:
        """A deadline of one call is set for the time in which it is enqueued, and the device begins it later."""
        parts.vendor._timeout_s = 600.0
        parts.known.recent += [Begun("all_to_all", 1, None, 0.3), Begun("broadcast", 2, None, 0.1)]
        parts.device.begun = 1
        assert 0.29 < self.look(parts, SOON_S) < SOON_S
        with pytest.raises(shotcast.CollectiveTimeout, match=r"all_to_all.* 0\.3 s"):
            parts.vendor.check()

    def test_a_long_deadline_of_one_call(self, parts: Any) -> None:
        parts.known.recent.append(Begun("all_to_all", 1, None, 600.0))
        parts.device.begun = 1
        assert self.look(parts, 0.5) == 0.5

    def test_a_dead_rank(self, parts: Any) -> None:
        parts.vendor._timeout_s = 600.0
        parts.device.begun = 1
        parts.gone.add(1)
        assert self.look(parts, SOON_S) < SOON_S
        with pytest.raises(shotcast.CollectiveTimeout) as caught:
            parts.vendor.check()
        assert (caught.value.missing, caught.value.reason) == ((1,), "dead")

    @pytest.mark.parametrize(("cause", "reason"), [("connection", "dead"), ("other", "late")])
    def test_a_broken_connection(self, parts: Any, cause: str, reason: str) -> None:
        """NCCL says that the connection to another host broke, where no process can be watched."""
        parts.vendor._timeout_s = 600.0
        parts.device.begun, parts.device.trouble = 1, CallError("remote process exited", cause)
        assert self.look(parts, SOON_S) < SOON_S
        with pytest.raises(shotcast.CollectiveTimeout) as caught:
            parts.vendor.check()
        assert (caught.value.missing, caught.value.reason) == ((1,), reason)

    def test_a_fault_of_own_kernels(self, parts: Any) -> None:
        parts.vendor._timeout_s = 600.0
        parts.device.begun = 1
        parts.faults.append(1)
        assert self.look(parts, SOON_S) < SOON_S
        with pytest.raises(shotcast.ShotcastError, match="a fault or an abort stopped the communicator"):
            parts.vendor.check()
        assert parts.device.stops == 1

    def test_a_broken_connection_to_another_node(self, parts: Any) -> None:
        """Nobody can tell from here whether the process has ended or the network is cut."""
        parts.vendor._host.layout = NodeLayout.of_keys(["a", "b"])
        parts.device.trouble = CallError("remote process exited", "connection")
        parts.device.begun = 1
        assert self.look(parts, SOON_S) < SOON_S
        with pytest.raises(shotcast.CollectiveTimeout, match=r"unreachable ranks: 1 \(node b\)") as caught:
            parts.vendor.check()
        assert (caught.value.missing, caught.value.reason) == ((1,), "unreachable")

    def test_a_fault_of_another_rank(self, parts: Any) -> None:
        parts.vendor._timeout_s = 600.0
        parts.device.begun = 1
        idle: Any = Device()
        parts.vendor._connected[0,] = Connected(idle, (0,), 0)  # which is looked at as often
        header = HeaderWords(1 << 47 | 8, 5)
        other = Blame(dist.PrefixStore("vendor/0", parts.store), 1, ())
        threading.Thread(target=other.verdict, args=((0, 1), header, 1.0, "other", True)).start()
        assert self.look(parts, SOON_S) < SOON_S
        with pytest.raises(shotcast.CollectiveTimeout) as caught:
            parts.vendor.check()
        assert (caught.value.missing, caught.value.reason) == ((1,), "interrupted")

    @pytest.mark.parametrize("left", [False, True], ids=["", "left"])
    def test_a_fault_that_kernels_see_a_moment_after_it_was_told(self, parts: Any, left: bool) -> None:
        """Native kernels know who is at fault, while the rank that told of it reports nothing, and may have left."""
        x, plan = torch.ones(2), CallPlan(Op.ALL_REDUCE, "vendor", "float32", 8)
        parts.vendor._stop = lambda fault: None
        parts.peers.alarmed = 0
        parts.gone.update([1] if left else [])
        threading.Timer(0.1, lambda: parts.faults.append(1)).start()
        begun = time.monotonic()
        with (
            mock.patch.multiple(blame, _KERNEL_S=200.0, **PATIENT),
            pytest.raises(shotcast.ShotcastError, match="a fault or an abort stopped the communicator"),
        ):
            parts.vendor.run(plan, x, x)
        assert time.monotonic() - begun < SOON_S
        assert not parts.vendor.failed_first, "the error of the kernels is the one to raise"

    def test_a_fault_of_connections_that_a_reset_has_replaced(self, parts: Any) -> None:
        parts.vendor.reset(1)
        late = CallError("the deadline has passed", "deadline")
        parts.vendor._fail((0, 1), Begun("all_reduce", 1, None, 0.2), time.monotonic(), late, False, 0)
        assert parts.alarms == []
        parts.vendor.check()

    def test_a_reset_waits_until_the_fault_is_settled(self, parts: Any) -> None:
        """A kernel after the reset is not to be ended for the fault before."""
        stops: list[int] = []
        parts.vendor._stop = stops.append
        parts.device.begun = 1
        self.look(parts, SOON_S)  # settled by a thread, after half a second without a report of rank 1
        parts.vendor.reset(1)
        assert len(stops) == 1
        parts.vendor.check()

    def test_the_watch_goes_on_without_the_store(self, parts: Any) -> None:
        """The process that holds it may be the one that was killed."""

        def fail(*_: Any) -> None:
            raise dist.DistNetworkError("connection reset")

        parts.vendor._blame._store = types.SimpleNamespace(check=fail, set=fail, compare_set=fail)
        parts.vendor._timeout_s = 0.6
        parts.device.begun = 1
        assert 0.5 < self.look(parts, SOON_S) < SOON_S
        with pytest.raises(shotcast.ShotcastError, match="Who is at fault is not known: connection reset"):
            parts.vendor.check()
        assert parts.device.stops == 1

    def test_graphs_captured_before_a_reset_are_found_out(self, parts: Any) -> None:
        parts.device.begun = parts.device.ended = 3
        parts.known.captured = True
        parts.vendor.reset(1)
        parts.vendor.check()
        parts.device.begun = parts.device.ended = 4
        with pytest.raises(shotcast.ShotcastError, match=r"captured before reset\(\)"):
            parts.vendor.check()
        assert parts.vendor.needs_reset()
        parts.vendor.reset(2)
        parts.vendor.check()

    def test_a_look_that_fails_does_not_end_the_watch(self, caplog: pytest.LogCaptureFixture) -> None:
        class Failing:
            looks = 0

            def look(self, now: float) -> None:
                self.looks += 1
                raise RuntimeError("no more threads")

        watch, failing = CallWatch("watch", 0.02), Failing()
        watch.add(failing)
        until = time.monotonic() + SOON_S
        while failing.looks < 3 and time.monotonic() < until:
            time.sleep(0.01)
        watch.remove(failing)
        assert failing.looks >= 3
        assert "no more threads" in caplog.text

    def test_the_watch_looks_until_it_is_told_to_stop(self, parts: Any) -> None:
        watch = CallWatch("watch", 0.02)
        watch.add(parts.vendor)
        parts.device.begun = 1
        until = time.monotonic() + SOON_S
        while not parts.vendor.failed and time.monotonic() < until:
            time.sleep(0.01)
        assert parts.vendor.failed
        watch.remove(parts.vendor)
        while watch._thread is not None and time.monotonic() < until:
            time.sleep(0.01)
        assert watch._thread is None


def test_a_rank_does_not_connect_to_one_that_failed() -> None:
    def interrupted() -> None:
        raise CallError("another rank failed")

    began = time.monotonic()
    with pytest.raises(CallError, match="another rank failed"):
        GlooGroup(dist.HashStore(), 0, 2, 1.0, 300.0, interrupted)
    assert time.monotonic() - began < SOON_S


def test_two_threads_connect_two_groups_in_any_order() -> None:
    """A wait for the keys of one group must not keep the process from setting those of the other."""
    assert shotcast.spawn(targets.connect_crosswise, 2, timeout_s=300) == [[], []]


def test_ranks_tell_each_other_of_calls_that_fail() -> None:
    assert shotcast.spawn(targets.hear_of_a_failure, 2, timeout_s=300) == [(-1, -1), (-1, 3)]
