"""All-reduce over logical nodes of GPUs that reach each other by NVSHMEM's puts, as GPUs of several hosts do.

Run with ``pytest -m gpu``. Two ranks may share a GPU (SHOTCAST_SHARE_GPUS=1). On one host, NVSHMEM's puts are stores to
mapped memory.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from node_kernel_targets import KINDS
from test_cuda_nodes import changing_sizes, graphs, late, rounded_values, values
from workers import FLOATS, killed

import shotcast
from shotcast.collectives import communicator
from shotcast.collectives.rank_device import enough_gpus
from shotcast.errors import ConfigError
from shotcast.memory import nvshmem_library
from shotcast.wire import SIXTEEN_BITS


def _installed() -> bool:
    try:
        return nvshmem_library.folder().is_dir()
    except ConfigError:
        return False


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(150),
    pytest.mark.skipif(not _installed(), reason="NVSHMEM is not installed"),
]
LONG = (pytest.mark.full, pytest.mark.timeout(560))
SHAPES = [(nodes, local) for nodes, local in ((2, 1), (3, 1), (2, 2), (4, 1), (4, 2)) if enough_gpus(nodes * local)]


def ranks_that_put(nodes: int, local: int, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
    env = {"SHOTCAST_RANKS_PER_NODE": str(local), "SHOTCAST_NETWORK": "nvshmem", "NVSHMEM_DISABLE_NVLS": "1"}
    return shotcast.spawn(fn, nodes * local, *args, env=env, **kwargs)


def facts() -> tuple[str, str, list[str], list[str]]:
    """Return the network, why it has no native kernels, the native candidates of a sum, and those of a gather."""
    with shotcast.Communicator(device="cuda", timeout_s=20) as comm:
        x = torch.ones(1000, device=comm.device)
        own = [name for name in comm.candidates(x) if name != "vendor"]
        others = [name for name in comm.candidates(x, "all_gather") if name != "vendor"]
        return comm.topology.network.name, comm.topology.unsupported_reason, own, others


def test_a_communicator_over_puts() -> None:
    for network, unsupported_reason, own, others in ranks_that_put(2, 1, facts, timeout_s=100):
        assert (network, unsupported_reason) == ("nvshmem", "")
        assert set(KINDS) <= set(own) <= {*KINDS, "nvrar_two_shot"}
        assert others == []


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("nodes", "local"), SHAPES)
def test_sums_are_those_of_the_tree(nodes: int, local: int, dtype: str) -> None:
    done = ranks_that_put(nodes, local, values, nodes, dtype, timeout_s=140)
    assert min(done) == max(done) > len(KINDS)


@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
@pytest.mark.parametrize(("nodes", "local"), SHAPES)
def test_sums_of_nodes_in_16_bits(nodes: int, local: int, dtype: str) -> None:
    done = ranks_that_put(nodes, local, rounded_values, nodes, dtype, timeout_s=140)
    assert min(done) == max(done) > 0


@pytest.mark.parametrize("calls", [2000, pytest.param(50_000, marks=LONG)])
@pytest.mark.parametrize(("nodes", "local"), SHAPES[:1])
def test_calls_of_changing_size_with_stragglers(nodes: int, local: int, calls: int) -> None:
    """It makes ``calls`` twice, from two epochs on."""
    ranks_that_put(nodes, local, changing_sizes, nodes, calls, timeout_s=140 if calls == 2000 else 500)


@pytest.mark.parametrize("replays", [300, pytest.param(10_000, marks=LONG)])
@pytest.mark.parametrize(("nodes", "local"), SHAPES[:1])
def test_graphs_replay_on_changed_inputs(nodes: int, local: int, replays: int) -> None:
    ranks_that_put(nodes, local, graphs, nodes, replays, timeout_s=140 if replays == 300 else 500)


@pytest.mark.parametrize("fault", ["killed", "stopped"])
@pytest.mark.parametrize(("nodes", "local"), SHAPES[:2])
def test_killed_or_stopped_rank(
    nodes: int, local: int, fault: str, record_property: Callable[[str, object], None]
) -> None:
    """Survivors name the rank, and their processes end, though NVSHMEM waits for all in its finalisation."""
    victim, timeout_s = nodes * local - 1, 30.0 if fault == "killed" else 3.0
    signum = signal.SIGKILL if fault == "killed" else signal.SIGSTOP
    results = ranks_that_put(
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


@pytest.mark.parametrize("kind", KINDS)
def test_reset_after_a_late_rank(kind: str) -> None:
    for rank, (error, took, nan) in enumerate(ranks_that_put(2, 1, late, 2, kind, 1, 2.0, timeout_s=90)):
        assert error.missing == (1,), error
        if rank == 0:
            assert 1.8 < took < 3
            assert nan


def absent() -> str:
    """Build a communicator that the last rank does not come to. Return the error."""
    with mock.patch.object(communicator, "SETUP_TIMEOUT_S", 5.0):
        comm = shotcast.Communicator(device="cuda", timeout_s=20)  # NVSHMEM is up
        if comm.rank == 1:
            time.sleep(8)
            return ""
        try:
            shotcast.Communicator(device="cuda", timeout_s=20)
        except shotcast.CollectiveTimeout as error:
            return str(error)
    return "no error"


def test_an_absent_rank_is_named() -> None:
    assert "missing ranks: 1" in ranks_that_put(2, 1, absent, timeout_s=90)[0]
