"""CPU ranks on several nodes: sums bit for bit, and faults that name the ranks, over real connections."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import expected_results
import pytest
import torch
from hosts_ranks import NAMES, SUMS, all_reduce, barrier, executor_of, layout_of

from local_ranks import DEAD, LocalGroup, run_ranks
from shotcast import wire
from shotcast.collectives import reference
from shotcast.collectives.registry import registered
from shotcast.errors import ConfigError, UnsupportedError
from shotcast.memory.operands import NormTensors
from shotcast.memory.symmetric import raise_failures
from shotcast.transport.cpu.norm_rows import norm_sum
from shotcast.transport.network import executor as network
from shotcast.transport.network import layout, sums
from shotcast.transport.network.control import RankState
from shotcast.wire import CallPlan, Fault, Header, LaunchShape, NodeShape, Norm, Op

pytestmark = pytest.mark.usefixtures("compiled_before_forking")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (0, 1, 7, 1000, 4097, 100_003)


def _inputs(world_size: int, count: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    generators = [torch.Generator().manual_seed(1000 * seed + rank) for rank in range(world_size)]
    return [torch.randn(count, generator=generator).to(dtype) for generator in generators]


def _sums(group: LocalGroup, nodes: int, local: int, sizes: tuple[int, ...]) -> list[str]:
    """Make calls of changing algorithms, dtypes and sizes; return those with other bits than the reference."""
    executor, layout = executor_of(group, nodes, local), layout_of(nodes, local)
    wrong = []
    cases = [(algorithm, dtype, size) for size in sizes for dtype in DTYPES for algorithm in SUMS]
    for number, (algorithm, dtype, size) in enumerate(cases):
        inputs = _inputs(layout.world_size, size, dtype, number)
        x = inputs[group.rank].clone()
        out = x if number % 3 == 0 else torch.full_like(x, 7)
        if number % 29 == group.rank:
            time.sleep(0.02)  # a straggler
        all_reduce(executor, algorithm, x, out)
        if executor.fault() is not None or not torch.equal(out, reference.tree_sum(inputs, layout)):
            wrong.append(f"{algorithm} {dtype} {size} {executor.fault()}")
        if number % 7 == 0:
            barrier(executor)
    group.barrier()
    executor.close()
    return wrong


@pytest.mark.parametrize(("nodes", "local"), [(2, 2), (3, 1)])
def test_sums_have_the_bits_of_the_documented_order(nodes: int, local: int) -> None:
    assert run_ranks(nodes * local, _sums, nodes, local, SIZES) == [[]] * (nodes * local)


@pytest.mark.full
@pytest.mark.parametrize(
    ("nodes", "local"), [(2, 1), (2, 3), (3, 2), (4, 1), (4, 2), (5, 1), (6, 1), (7, 1), (8, 1), (8, 2), (9, 1)]
)
def test_sums_of_more_ranks(nodes: int, local: int) -> None:
    sizes = (*SIZES, 700_001)
    assert run_ranks(nodes * local, _sums, nodes, local, sizes, timeout_s=300) == [[]] * (nodes * local)


def _rounded_sums(group: LocalGroup, nodes: int, local: int, sizes: tuple[int, ...]) -> list[str]:
    """Sum in 16 bits, between exact sums of other sizes; return the calls with other bits than the reference."""
    executor, layout = executor_of(group, nodes, local), layout_of(nodes, local)
    wrong = []
    for number, (dtype, size) in enumerate(itertools.product(DTYPES[1:], (*sizes, *reversed(sizes)))):
        inputs = [2.0 ** (number % 3 * -9) * x for x in _inputs(layout.world_size, size, dtype, number)]
        x = inputs[group.rank].clone()
        out = x if number % 3 == 0 else torch.full_like(x, 7)
        if number % 11 == group.rank:
            time.sleep(0.02)
        all_reduce(executor, "nvrar_16bit", x, out)
        if executor.fault() is not None or not torch.equal(out, expected_results.rounded_nodes_sum(inputs, layout)):
            wrong.append(f"{dtype} {size} {executor.fault()}")
        if number % 3 == 1:
            x = inputs[group.rank][: size // 2].clone()
            all_reduce(executor, "nvrar_pairs", x, x)
            if not torch.equal(x, reference.tree_sum([each[: size // 2] for each in inputs], layout)):
                wrong.append(f"exact {dtype} {size // 2}")
    group.barrier()
    executor.close()
    return wrong


STEPS = (0, 1, 7, 1001, 20_003, 100_003)
"""Elements, of which all nodes but two exchange the last in two steps, and all the first in one."""


@pytest.mark.parametrize(("nodes", "local"), [(2, 2), (3, 1), (4, 1)])
def test_sums_of_nodes_in_16_bits(nodes: int, local: int) -> None:
    wrong = run_ranks(nodes * local, _rounded_sums, nodes, local, STEPS)
    assert wrong == [[]] * (nodes * local)


@pytest.mark.full
@pytest.mark.parametrize(("nodes", "local"), [(2, 1), (2, 3), (3, 2), (4, 2), (5, 1), (6, 1), (7, 1), (8, 1), (8, 2)])
def test_sums_of_more_nodes_in_16_bits(nodes: int, local: int) -> None:
    sizes = (*STEPS, 700_001)
    assert run_ranks(nodes * local, _rounded_sums, nodes, local, sizes, timeout_s=300) == [[]] * (nodes * local)


_MESSAGES = (1024, 1 << 19)
"""Elements that are exchanged in one step, and in two."""


def _received(group: LocalGroup) -> list[int]:
    """Return the bytes that come from other nodes in calls of both sizes; each rank sends as many."""
    executor = executor_of(group, 4, 1)
    came = []
    for count in _MESSAGES:
        x = torch.ones(count, dtype=torch.bfloat16)
        before = _bytes_received(executor)
        group.barrier()
        all_reduce(executor, "nvrar_16bit", x, x)
        came.append(_bytes_received(executor) - before)
        group.barrier()
    executor.close()
    return came


def _bytes_received(executor: Any) -> int:
    """Return the bytes that have come on the connections of data (of struct tcp_info, where Linux has them)."""
    total, first = 0, layout.DESCRIPTORS // 8
    for node in set(range(4)) - {executor._node}:
        with socket.socket(fileno=os.dup(executor._network[first + node])) as connection:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
        total += int.from_bytes(info[128:136], sys.byteorder)
    return total


def test_sums_in_16_bits_send_what_the_cost_model_says() -> None:
    """And 32 bytes before the data of each frame."""
    for came in run_ranks(4, _received):
        for count, nbytes, frames in zip(_MESSAGES, came, (3, 6), strict=True):
            work = registered()["nvrar_16bit"].forms[Op.ALL_REDUCE].work(2 * count, NodeShape(4, 1), 2)
            assert nbytes == work.spread_sent + 32 * frames


def test_float32_is_not_rounded_to_16_bits() -> None:
    plan = CallPlan(Op.ALL_REDUCE, "nvrar_16bit", "float32", 4)
    with pytest.raises(UnsupportedError, match="nvrar_16bit adds up float16 and bfloat16, not float32"):
        sums.IN_16_BITS.arithmetic(plan)


def _special_values(group: LocalGroup) -> list[str]:
    executor, layout = executor_of(group, 3, 1), layout_of(3, 1)
    row = [float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 1e-45, 3e38, 1.0]
    wrong = []
    for dtype in DTYPES:
        inputs = [torch.tensor(row[rank:] + row[:rank]).to(dtype).repeat(9) for rank in range(3)]
        for algorithm in (*SUMS, *([] if dtype is torch.float32 else ["nvrar_16bit"])):
            out = torch.empty_like(inputs[0])
            all_reduce(executor, algorithm, inputs[group.rank], out)
            bits = torch.int32 if dtype is torch.float32 else torch.int16
            rounds = algorithm == "nvrar_16bit"
            expected = (expected_results.rounded_nodes_sum if rounds else reference.tree_sum)(inputs, layout)
            nan = {torch.float32: 0x7FC00000, torch.bfloat16: 0x7FC0, torch.float16: 0x7E00}[dtype]
            expected_bits = torch.where(expected.isnan(), torch.tensor(nan, dtype=bits), expected.view(bits))
            if not torch.equal(out.view(bits), expected_bits):
                wrong.append(f"{algorithm} {dtype}")
    group.barrier()
    executor.close()
    return wrong


def test_special_values_have_the_same_bits_everywhere() -> None:
    assert run_ranks(3, _special_values) == [[]] * 3


def _fused(group: LocalGroup, nodes: int, local: int) -> list[str]:
    """Return the fused calls whose outputs have other bits than the norm of the sum."""
    executor, layout, wrong = executor_of(group, nodes, local), layout_of(nodes, local), []
    launch = LaunchShape(programs=0, block_words=0, num_warps=0)
    for number, (rows, hidden, dtype) in enumerate(itertools.product((1, 5), (64, 1001), DTYPES)):
        inputs = _inputs(layout.world_size, rows * hidden, dtype, number)
        residual, weight = _inputs(2, rows * hidden, dtype, 50 + number)
        norm = Norm(hidden, kind=wire.NORM_KINDS[number % 3])
        op = Op.ALL_REDUCE_RMS_NORM if norm.kind == wire.RMS else Op.ALL_REDUCE_LAYER_NORM
        for algorithm in SUMS:
            gain, rows_of = weight[:hidden], residual.shape
            tensors, expected = (
                NormTensors(
                    residual.clone(), gain, 1e-6, residual.new_empty(rows_of), residual.new_empty(rows_of), bias=gain
                )
                for _ in range(2)
            )
            nbytes = inputs[0].numel() * inputs[0].element_size()
            plan = CallPlan(op, algorithm, str(dtype)[6:], nbytes, launch=launch, norm=norm)
            executor.bind(plan).run(inputs[group.rank], None, tensors)
            norm_sum(reference.tree_sum(inputs, layout).view(rows, hidden), expected, norm)
            same = torch.equal(tensors.new_residual, expected.new_residual)
            if executor.fault() is not None or not same or not torch.equal(tensors.normed, expected.normed):
                wrong.append(f"{algorithm} {rows} {hidden} {dtype}")
    group.barrier()
    executor.close()
    return wrong


@pytest.mark.parametrize(("nodes", "local"), [(2, 2), pytest.param(3, 1, marks=pytest.mark.full)])
def test_fused_rows_have_the_bits_of_sum_and_norm(nodes: int, local: int) -> None:
    assert run_ranks(nodes * local, _fused, nodes, local) == [[]] * (nodes * local)


def _copied(group: LocalGroup, nodes: int, local: int) -> list[str]:
    """Gather parts, of equal and of different sizes, and broadcast from every rank."""
    executor, world_size, wrong = executor_of(group, nodes, local), nodes * local, []
    launch = LaunchShape(programs=0, block_words=0, num_warps=0)
    for sizes in (
        (0,) * world_size,
        (3,) * world_size,
        range(world_size),
        [300_001 * (r % 2) + 1 for r in range(world_size)],
    ):
        parts = [torch.arange(size, dtype=torch.int16) + rank for rank, size in enumerate(sizes)]
        out, expected = torch.full((sum(sizes),), -1, dtype=torch.int16), torch.cat(parts)
        uneven = tuple(sizes) if len(set(sizes)) > 1 else ()
        plan = CallPlan(Op.ALL_GATHER, "vendor", "int16", 2 * len(out), sizes=uneven, launch=launch)
        executor.bind(plan).run(parts[group.rank], out)
        if executor.fault() is not None or not torch.equal(out, expected):
            wrong.append(f"all_gather {list(sizes)} {executor.fault()}")
    for root in range(world_size):
        for count in (0, 1, 700_001):
            x = torch.full((count,), root if group.rank == root else 77, dtype=torch.uint8)
            plan = CallPlan(Op.BROADCAST, "vendor", "uint8", count, root=root, launch=launch)
            executor.bind(plan).run(x, x)
            if executor.fault() is not None or not (x == root).all():
                wrong.append(f"broadcast {root} {count} {executor.fault()}")
    group.barrier()
    executor.close()
    return wrong


@pytest.mark.full
@pytest.mark.parametrize(
    ("nodes", "local"), [(2, 3), pytest.param(5, 1, marks=pytest.mark.full), pytest.param(3, 2, marks=pytest.mark.full)]
)
def test_copies(nodes: int, local: int) -> None:
    assert run_ranks(nodes * local, _copied, nodes, local) == [[]] * (nodes * local)


# -- faults --------------------------------------------------------------------------------------------------------


def _fault_of(group: LocalGroup, nodes: int, local: int, who: int, what: str, given_up: Any = None) -> Any:
    """Fail in a call because rank ``who`` does ``what``; return the fault and the time from the call to it."""
    network._SILENT_S, network._PATIENCE_S = 1.0, 1.5  # of ranks that wait, on a busy machine
    executor = executor_of(group, nodes, local)
    x = torch.ones(1000)
    for algorithm in SUMS:
        all_reduce(executor, algorithm, x, torch.empty_like(x))  # compiled, and everyone has come
    executor.set_timeout(600.0 if what in ("dies", "calls something else") else 2.0)
    group.barrier()
    if group.rank == who:
        if what == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "stops":
            os.kill(os.getpid(), signal.SIGSTOP)
        if what == "is absent":
            group.barrier()  # the others have given up
    if what == "is not heard":
        executor._control.ask = lambda epoch, patience_s: {}  # type: ignore[method-assign]
    began = time.monotonic()
    size = 999 if group.rank == who and what in ("calls something else", "is not heard") else 1000
    y = torch.ones(size)
    all_reduce(executor, "nvrar", y, y)
    took = time.monotonic() - began
    if what == "is absent" and group.rank != who:
        group.barrier()
    if given_up is not None:
        given_up.set()
    fault = executor.fault()
    headers = executor.headers(executor.epoch) if what == "calls something else" else []
    nan = bool(y.isnan().all())
    if what != "dies":
        group.barrier()
    executor.close()
    return fault, took, nan, [None if words is None else Header.decode(words, NAMES).nbytes for words in headers]


FULL = pytest.mark.full
SOON_S = 60.0
"""The longest that a fault takes to be seen on a busy machine."""


@pytest.mark.timing
@pytest.mark.parametrize(
    ("nodes", "local", "who"), [(2, 2, 3), pytest.param(2, 1, 1, marks=FULL), pytest.param(3, 1, 0, marks=FULL)]
)
def test_an_absent_rank_is_named_at_the_deadline(nodes: int, local: int, who: int) -> None:
    for fault, took, nan, _ in run_ranks(nodes * local, _fault_of, nodes, local, who, "is absent"):
        assert (fault.kind, fault.ranks) == (wire.TIMEOUT, (who,))
        assert took < SOON_S
        assert nan


@pytest.mark.timing
@pytest.mark.parametrize(("nodes", "local", "who"), [(3, 1, 2), pytest.param(2, 1, 1, marks=FULL)])
def test_a_killed_rank_is_named_at_once(nodes: int, local: int, who: int) -> None:
    results = run_ranks(nodes * local, _fault_of, nodes, local, who, "dies", mortal=True)
    for rank, result in enumerate(results):
        if rank == who:
            assert result == DEAD
        else:
            fault, took, nan, _ = result
            assert (fault.kind, fault.ranks) == (wire.DEAD, (who,))
            assert took < SOON_S, "long before the deadline"
            assert nan


@pytest.mark.timing
@pytest.mark.parametrize(("nodes", "local", "who"), [(2, 2, 2), pytest.param(2, 1, 1, marks=FULL)])
def test_a_stopped_rank_is_named_at_the_deadline(nodes: int, local: int, who: int) -> None:
    given_up = multiprocessing.get_context("fork").Event()

    def meddle(processes: list[int]) -> None:
        until = time.monotonic() + SOON_S
        while time.monotonic() < until:
            with open(f"/proc/{processes[who]}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "T":
                    break
            time.sleep(0.01)
        given_up.wait(SOON_S)
        os.kill(processes[who], signal.SIGCONT)

    results = run_ranks(nodes * local, _fault_of, nodes, local, who, "stops", given_up, meddle=meddle)
    for rank, (fault, took, nan, _) in enumerate(results):
        if rank != who:
            assert fault.kind in (wire.TIMEOUT, wire.UNREACHABLE)
            assert fault.ranks == (who,)
            assert took < SOON_S
            assert nan


WAITS, IS_LATE = RankState(None, 0.01, 0, False), RankState(None, 5.0, 0, False)
ANSWERS = [
    ({1: [IS_LATE]}, wire.TIMEOUT, (1,)),
    ({1: [WAITS]}, wire.UNREACHABLE, (2,)),
    ({1: [WAITS], 2: [IS_LATE]}, wire.TIMEOUT, (2,)),
    ({1: [WAITS], 2: [WAITS]}, wire.TIMEOUT, (1, 2)),
]
"""Answers of nodes that have not begun a call, by node, and who is at fault then."""


def _blamed(group: LocalGroup) -> list[tuple[int, tuple[int, ...]]]:
    """Make calls alone on rank 0, with each of the answers; return the faults."""
    executor = executor_of(group, 3, 1)
    x, found = torch.ones(1000), []
    all_reduce(executor, "nvrar", x, torch.empty_like(x))
    executor.set_timeout(0.3)
    for answers, *_ in ANSWERS:
        group.barrier()
        if group.rank == 0:
            executor._control.ask = lambda epoch, patience_s, answers=answers: answers  # type: ignore[method-assign,misc]
            all_reduce(executor, "nvrar", x, torch.empty_like(x))
            fault = executor.fault()
            assert fault is not None
            found.append((fault.kind, tuple(fault.ranks)))
        executor.clear(max(group.all_gather(executor.epoch)))
    executor.close()
    return found


@pytest.mark.full
def test_a_rank_that_others_keep_in_an_earlier_call_is_not_late() -> None:
    assert run_ranks(3, _blamed)[0] == [(kind, ranks) for _, kind, ranks in ANSWERS]


@pytest.mark.timing
def test_calls_that_differ_are_a_mismatch() -> None:
    for fault, took, _, sizes in run_ranks(3, _fault_of, 3, 1, 1, "calls something else"):
        assert (fault.kind, fault.ranks) == (wire.MISMATCH, (1,))
        # two ranks that differ are enough: the third may not have made its call yet
        assert (sizes[1], sizes[0] or sizes[2]) == (3996, 4000)
        assert {sizes[0], sizes[2]} <= {4000, None}
        assert took < SOON_S


def test_a_mismatch_with_a_node_that_does_not_answer_names_its_ranks() -> None:
    for fault, *_ in run_ranks(2, _fault_of, 2, 1, 1, "is not heard"):
        assert fault.kind == wire.MISMATCH
        assert fault.ranks in ((0,), (1,))


def _go_on_after_a_fault(group: LocalGroup) -> tuple[Fault | None, Fault | None, bool]:
    executor = executor_of(group, 2, 2)
    x = torch.ones(5000)
    for algorithm in SUMS:
        all_reduce(executor, algorithm, x, torch.empty_like(x))  # compiled
    executor.set_timeout(0.5)
    group.barrier()
    if group.rank == 3:
        time.sleep(1.2)
    all_reduce(executor, "nvrar_two_shot", x, torch.empty_like(x))
    first = executor.fault()
    group.barrier()
    executor.clear(max(group.all_gather(executor.epoch)))
    executor.set_timeout(20)
    group.barrier()
    out = torch.empty_like(x)
    for algorithm in SUMS:
        all_reduce(executor, algorithm, x, out)
    again = executor.fault()
    group.barrier()
    executor.close()
    return first, again, bool((out == 4).all())


@pytest.mark.full
def test_ranks_connect_anew_after_a_fault() -> None:
    for first, again, right in run_ranks(4, _go_on_after_a_fault):
        assert first is not None
        assert first.ranks == (3,)
        assert again is None
        assert right


# -- messages ------------------------------------------------------------------------------------------------------


def _pass_messages(group: LocalGroup) -> list[int]:
    """Send to every rank, of this node and others, before receiving: short messages do not wait for receivers."""
    executor, wrong = executor_of(group, 2, 2), []
    for count in (0, 1, 5000, 300_000):
        for distance in range(1, 4):
            to, of = (group.rank + distance) % 4, (group.rank - distance) % 4
            mine, theirs = torch.full((count,), float(group.rank)), torch.empty(count)
            calls = [(Op.SEND, to, mine), (Op.RECV, of, theirs)]
            for op, peer, tensor in calls if count < 300_000 or group.rank < to else reversed(calls):
                plan = CallPlan(op, "message", "float32", 4 * count, root=peer)
                executor.bind(plan).run(tensor, None)
            if executor.fault() is not None or not (theirs == of).all():
                wrong.append(count)
        barrier(executor)
    group.barrier()
    executor.close()
    return wrong


def test_messages_between_all_ranks() -> None:
    assert run_ranks(4, _pass_messages) == [[]] * 4


def _fail_in_a_message(group: LocalGroup, what: str) -> Any:
    executor = executor_of(group, 2, 1, timeout_s=0.5 if what == "absent" else 600)
    op, count = (Op.SEND, 10) if group.rank == 0 else (Op.RECV, 11 if what == "differs" else 10)
    x = torch.ones(count)
    if group.rank == 0 and what == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if group.rank == 1 or what == "differs":
        executor.bind(CallPlan(op, "message", "float32", 4 * count, root=1 - group.rank)).run(x, None)
    if what != "dies":
        group.barrier()
    fault, headers = executor.fault(), executor.headers(executor.epoch) if group.rank else []
    return fault, [None if words is None else Header.decode(words, NAMES).nbytes for words in headers]


@pytest.mark.full
def test_faults_of_messages() -> None:
    fault, _ = run_ranks(2, _fail_in_a_message, "absent")[1]
    assert (fault.kind, fault.op, fault.ranks) == (wire.TIMEOUT, "recv", (0,))
    fault, _ = run_ranks(2, _fail_in_a_message, "dies", mortal=True)[1]
    assert (fault.kind, fault.ranks) == (wire.DEAD, (0,))
    fault, sizes = run_ranks(2, _fail_in_a_message, "differs")[1]
    assert (fault.kind, fault.ranks) == (wire.MISMATCH, (0,))
    assert sizes == [40, 44]


# -- connections ---------------------------------------------------------------------------------------------------


def _with_secrets(group: LocalGroup, secrets: list[str]) -> str:
    os.environ["SHOTCAST_SECRET"] = secrets[group.rank]
    import shotcast.transport.network.executor as module

    module._CONNECT_S = 2.0
    try:
        executor = executor_of(group, 2, 1)
    except ConfigError as error:
        return str(error)
    group.barrier()
    executor.close()
    return ""


def _resources() -> tuple[int, int, int]:
    """Return the descriptors, threads and files of shared memory of this process."""
    shared = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm/" in line]
    return len(os.listdir("/proc/self/fd")), threading.active_count(), len(shared)


def _refused_measurement(group: LocalGroup) -> tuple[str, bool]:
    import shotcast.transport.network.executor as module

    def measure(self: Any) -> None:
        raise_failures(self._hosts, "" if group.rank else "no network")

    module.HostsExecutor._measure = measure
    gc.collect()
    before = _resources()
    try:
        executor_of(group, 2, 1)
    except ConfigError as error:
        message = str(error)
    gc.collect()
    return message, _resources() == before


@pytest.mark.full
def test_a_failed_construction_leaves_nothing_behind() -> None:
    for message, clean in run_ranks(2, _refused_measurement):
        assert "no network" in message
        assert clean


def _far_away(group: LocalGroup) -> tuple[Fault | None, bool]:
    import shotcast.transport.network.connect as module

    executor = executor_of(group, 2, 1)
    accept = module.Hellos.accept

    def accept_late(self: Any, one: socket.socket, expected: Any) -> Any:
        time.sleep(0.4)  # as three round trips of 130 ms take
        return accept(self, one, expected)

    module.Hellos.accept = accept_late  # type: ignore[method-assign]
    x = torch.arange(5.0) if group.rank == 0 else torch.zeros(5)
    op = Op.RECV if group.rank else Op.SEND
    executor.bind(CallPlan(op, "message", "float32", 20, root=1 - group.rank)).run(x, x)
    group.barrier()
    executor.close()
    return executor.fault(), torch.equal(x, torch.arange(5.0))


def test_messages_connect_over_a_slow_network() -> None:
    assert run_ranks(2, _far_away) == [(None, True)] * 2


@pytest.mark.full
def test_only_ranks_with_the_same_secret_connect() -> None:
    assert run_ranks(2, _with_secrets, ["a", "a"]) == ["", ""]
    for text in run_ranks(2, _with_secrets, ["a", "b"]):
        assert "SHOTCAST_SECRET" in text


def _with_a_stranger(group: LocalGroup, port: int) -> bool:
    os.environ["SHOTCAST_PORT_RANGE"] = f"{port}-{port + 1}"
    if group.rank == 1:
        import shotcast.transport.network.connect as module

        dial = module.Hellos.dial

        def dial_late(self: Any, rank: int, purpose: str, deadline: float) -> socket.socket:
            stranger = socket.create_connection(self.places[rank])
            stranger.sendall(b"\0\0\0\2{}GET / HTTP/1.1\r\n\r\n")
            socket.create_connection(self.places[rank]).close()
            return dial(self, rank, purpose, deadline)

        module.Hellos.dial = dial_late  # type: ignore[method-assign]
    executor = executor_of(group, 2, 1)
    x = torch.ones(10)
    all_reduce(executor, "nvrar", x, x)
    group.barrier()
    executor.close()
    return bool((x == 2).all())


@pytest.mark.full
def test_strangers_are_turned_away() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = min(probe.getsockname()[1], 65000)
    assert run_ranks(2, _with_a_stranger, port) == [True, True]
