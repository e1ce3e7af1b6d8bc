"""All-reduce over logical nodes on real GPUs, one launch each. Run with ``pytest -m gpu``; ranks may share GPUs."""

from __future__ import annotations

import itertools
import random
import signal
import time
from collections.abc import Callable
from typing import Any

import fused_targets
import pytest
import torch
from fused_targets import Case
from node_kernel_targets import KINDS, tree_sum
from workers import FLOATS, check, differing, failing_call, inputs, killed, shifted, straggle, warm

import shotcast
from shotcast.collectives.rank_device import enough_gpus
from shotcast.errors import ConfigError
from shotcast.wire import SIXTEEN_BITS, Op

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150)]
SHAPES = [(nodes, local) for nodes, local in ((2, 1), (2, 2), (3, 1), (4, 1), (4, 2)) if enough_gpus(nodes * local)]
COUNTS = [0, 1, 5, 64, 1000, 4099, 65536, 100_003]
LARGE = 6_000_003
"""Elements that pass in pieces."""


def ranks_on_nodes(nodes: int, local: int, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
    env = {"SHOTCAST_RANKS_PER_NODE": str(local)}
    return shotcast.spawn(fn, nodes * local, *args, env=env, **kwargs)


def shared(comm: shotcast.Communicator, calls: int) -> int:
    """Return a number of calls: fewer where ranks take turns on a GPU, some milliseconds a step."""
    return calls if torch.cuda.device_count() >= comm.world_size else calls // 10


def values(nodes: int, name: str) -> int:
    """Compare sums of a dtype with those of the tree, bit by bit, in place and not. Return the number of calls.

    The communicator is exclusive, as others would load kernels of all sizes with the first call.
    """
    done, dtype = 0, FLOATS[name]
    with shotcast.Communicator(device="cuda", timeout_s=60, exclusive=True) as comm:
        assert comm.topology.shape.nodes == nodes
        for count, shift in itertools.product(COUNTS, (0, 1)):
            xs = inputs(count, dtype, comm.world_size, count, comm.device)
            wanted = tree_sum(xs, nodes)
            for kind in KINDS:
                x = shifted(xs[comm.rank], shift)
                check(comm.all_reduce(x, algorithm=kind), wanted, (kind, name, count, shift))
                comm.all_reduce(x, out=x, algorithm=kind)
                check(x, wanted, (kind, name, count, shift, "in place"))
                done += 2
        kind = KINDS[list(FLOATS).index(name)]
        xs = inputs(LARGE, dtype, comm.world_size, 3, comm.device)
        check(comm.all_reduce(xs[comm.rank], algorithm=kind), tree_sum(xs, nodes), (kind, name, LARGE))
        comm.check()
    return done


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("nodes", "local"), SHAPES)
def test_sums_are_those_of_the_tree(nodes: int, local: int, dtype: str) -> None:
    done = ranks_on_nodes(nodes, local, values, nodes, dtype, timeout_s=140)
    assert done == [len(KINDS) * len(COUNTS) * 4] * (nodes * local)


@pytest.mark.parametrize(("nodes", "local"), SHAPES[:2])
def test_norms_in_the_same_kernel(nodes: int, local: int) -> None:
    cases = [Case("bfloat16", 5, 8192), Case("float32", 3, 1000, shift=1), Case("float16", 64, 2048)]
    ops = [Op.ALL_REDUCE_RMS_NORM]
    done = ranks_on_nodes(nodes, local, fused_targets.cases, "cuda", cases, ops, 8 << 20, 2, timeout_s=140)
    assert min(done) == max(done) >= (1 + 3 * 2) * len(cases)


def rounded_values(nodes: int, name: str) -> int:
    """Compare sums of nodes in 16 bits, bit by bit, in place and not, in one step and in two. Return the calls."""
    done, dtype = 0, FLOATS[name]
    with shotcast.Communicator(device="cuda", timeout_s=60, exclusive=True) as comm:
        for count, shift in itertools.product((*COUNTS, LARGE), (0, 1)):
            xs = inputs(count, dtype, comm.world_size, count, comm.device)
            wanted = tree_sum(xs, nodes, "nvrar_16bit")
            x = shifted(xs[comm.rank], shift)
            check(comm.all_reduce(x, algorithm="nvrar_16bit"), wanted, (name, count, shift))
            comm.all_reduce(x, out=x, algorithm="nvrar_16bit")
            check(x, wanted, (name, count, shift, "in place"))
            done += 2
        x = torch.ones(10, device=comm.device)
        with pytest.raises(ConfigError, match="16 bits of float16 or bfloat16, and this is float32"):
            comm.all_reduce(x, algorithm="nvrar_16bit")
        assert comm.explain(x.bfloat16()).algorithm != "nvrar_16bit"
        comm.check()
    return done


@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
@pytest.mark.parametrize(("nodes", "local"), SHAPES)
def test_sums_of_nodes_in_16_bits(nodes: int, local: int, dtype: str) -> None:
    done = ranks_on_nodes(nodes, local, rounded_values, nodes, dtype, timeout_s=140)
    assert done == [(len(COUNTS) + 1) * 4] * (nodes * local)


def changing_sizes(nodes: int, calls: int) -> None:
    """Make calls of drawn sizes, kinds, dtypes, with stragglers and calls of other kinds; across epoch 2^32 too."""
    largest = 100_000
    with shotcast.Communicator(device="cuda", timeout_s=60) as comm:
        together, own = random.Random(7), random.Random(comm.rank)
        pools = {name: inputs(largest, dtype, comm.world_size, 3, comm.device) for name, dtype in FLOATS.items()}
        kinds = (*KINDS, "nvrar_16bit")
        sums = {(name, kind): tree_sum(pool, nodes, kind) for name, pool in pools.items() for kind in kinds}
        wrong = torch.zeros((), dtype=torch.int64, device=comm.device)
        for border in (None, 1 << 32):
            if border:
                comm._executor.drain()
                comm._host.barrier()
                comm._executor.set_epoch(border - 40)
                comm._executor.drain()
                comm._host.barrier()
            for _ in range(shared(comm, calls)):
                name, kind = together.choice(list(FLOATS)), together.choice(kinds)
                if kind == "nvrar_16bit" and name == "float32":
                    name = "float16"
                count = int(largest ** together.random())
                x = pools[name][comm.rank][:count]
                straggle(comm, own)
                wrong += differing(comm.all_reduce(x, algorithm=kind), sums[name, kind][:count])
                if together.random() < 0.1:
                    got = comm.all_gather(x.view(torch.uint8))
                    wrong += differing(got, torch.cat([one[:count] for one in pools[name]]).view(torch.uint8))
        assert int(wrong) == 0, f"{int(wrong)} elements differ"
        comm.check()


@pytest.mark.parametrize(("nodes", "local"), SHAPES)
def test_calls_of_changing_size_with_stragglers(nodes: int, local: int) -> None:
    ranks_on_nodes(nodes, local, changing_sizes, nodes, 5000, timeout_s=140)


def graphs(nodes: int, replays: int) -> None:
    """Replay graphs of several calls on changed inputs, between eager calls."""
    with shotcast.Communicator(device="cuda", timeout_s=60) as comm:
        together, own = random.Random(1), random.Random(comm.rank)
        captured = []
        for count, kind in itertools.product((500, 4096, 70_001), (*KINDS, "nvrar_16bit")):
            x = torch.zeros(count, dtype=torch.bfloat16, device=comm.device)
            out = torch.empty_like(x)
            comm.all_reduce(x, out=out, algorithm=kind)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(3):
                    comm.all_reduce(x, out=out, algorithm=kind)
            captured.append((kind, x, out, graph))
        wrong = torch.zeros((), dtype=torch.int64, device=comm.device)
        for replay in range(shared(comm, replays)):
            kind, x, out, graph = together.choice(captured)
            xs = inputs(x.numel(), torch.bfloat16, comm.world_size, replay, comm.device)
            x.copy_(xs[comm.rank])
            if own.random() < 0.3:
                torch.cuda._sleep(own.randrange(300_000))
            graph.replay()
            wrong += differing(out, tree_sum(xs, nodes, kind))
            if together.random() < 0.3:
                wrong += differing(comm.all_reduce(xs[comm.rank], algorithm=kind), tree_sum(xs, nodes, kind))
        assert int(wrong) == 0
        comm.check()


@pytest.mark.parametrize(("nodes", "local"), SHAPES)
def test_graphs_replay_on_changed_inputs(nodes: int, local: int) -> None:
    ranks_on_nodes(nodes, local, graphs, nodes, 500, timeout_s=140)


@pytest.mark.parametrize("fault", ["killed", "stopped"])
@pytest.mark.parametrize(("nodes", "local"), SHAPES[:2])
def test_killed_or_stopped_rank(
    nodes: int, local: int, fault: str, record_property: Callable[[str, object], None]
) -> None:
    """Survivors of both nodes name a stopped rank at the deadline, a killed one long before; later calls fail too."""
    victim, timeout_s = nodes * local - 1, 30.0 if fault == "killed" else 3.0
    signum = signal.SIGKILL if fault == "killed" else signal.SIGSTOP
    results = ranks_on_nodes(
        *(nodes, local, killed, "cuda", "nvrar", victim, signum, timeout_s), timeout_s=90, return_exceptions=True
    )
    for rank, outcome in enumerate(results[:victim]):
        assert isinstance(outcome, dict), outcome
        record_property(f"rank_{rank}", f"{outcome['took']:.3f} s: {outcome['error']}")
        assert isinstance(outcome["error"], shotcast.CollectiveTimeout), outcome["error"]
        assert outcome["error"].missing == (victim,)
        assert outcome["took"] < (5 if fault == "killed" else timeout_s + 1)
        assert isinstance(outcome["again"], shotcast.CollectiveTimeout)
        assert outcome["nan"]


def late(nodes: int, kind: str, victim: int, timeout_s: float) -> Any:
    """Bring a rank after the deadline; reset all ranks, and check that sums are right again."""
    with shotcast.Communicator(device="cuda", timeout_s=timeout_s) as comm:
        warm(comm, kind)
        comm._host.barrier()
        if comm.rank == victim:
            time.sleep(timeout_s + 1.5)
        error, took, nan = failing_call(comm, kind)
        comm.reset()
        comm.check()
        xs = inputs(1000, torch.bfloat16, comm.world_size, 3, comm.device)
        for name in (*KINDS, *KINDS):
            check(comm.all_reduce(xs[comm.rank], algorithm=name), tree_sum(xs, nodes), "after reset")
        return error, took, nan


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("nodes", "local"), SHAPES[:2])
def test_reset_after_a_late_rank(nodes: int, local: int, kind: str) -> None:
    victim = nodes * local - 1
    for rank, (error, took, nan) in enumerate(
        ranks_on_nodes(nodes, local, late, nodes, kind, victim, 2.0, timeout_s=90)
    ):
        assert error.missing == (victim,), error
        if rank != victim:
            assert 1.8 < took < 3
            assert nan
