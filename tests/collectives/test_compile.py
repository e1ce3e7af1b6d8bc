"""Collectives under torch.compile(fullgraph=True): the same calls, bits and gradients as eager code."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import compile_targets as targets
import operation_targets
import pytest

import shared_ranks
import shotcast

pytestmark = pytest.mark.long

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler on the CPU")
BACKENDS = [
    pytest.param("aot_eager", marks=[pytest.mark.full] if shutil.which("g++") else []),
    pytest.param("inductor", marks=needs_compiler),
]
"""Inductor compiles the graphs that aot_eager hands on, so a test with Inductor covers both."""
SOMETIMES = ["aot_eager", pytest.param("inductor", marks=[needs_compiler, pytest.mark.full])]
"""Backends of tests that Inductor takes a minute for on two cores.

The test of the order and an example (05_compile.py) cover it too.
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("inductor")


@pytest.fixture(autouse=True)
def empty_inductor_cache(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Use an empty Inductor cache, as cached code was compiled from another version of the package."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")


def compile_on_ranks(fn: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Run a target on ranks that other tests use too, as PyTorch's compilers take seconds to load."""
    return shared_ranks.run(targets.with_nothing_compiled, world_size, fn, *args)


@pytest.mark.full
@pytest.mark.parametrize("backend", SOMETIMES)
def test_every_call(backend: str) -> None:
    assert compile_on_ranks(targets.compiled_equals_eager, 2, backend) == [1, 1]


@pytest.mark.full
def test_every_call_on_three_ranks() -> None:
    assert compile_on_ranks(targets.compiled_equals_eager, 3, "aot_eager") == [1, 1, 1]


@pytest.mark.full
@pytest.mark.parametrize("backend", SOMETIMES)
def test_fused_calls(backend: str) -> None:
    graphs = compile_on_ranks(targets.fused_equals_eager, 2, backend)
    assert graphs == [1, 1]


@pytest.mark.full
@pytest.mark.parametrize("backend", SOMETIMES)
def test_one_graph_for_all_sizes(backend: str) -> None:
    assert compile_on_ranks(targets.dynamic_sizes, 2, backend) == [1, 1]


@pytest.mark.full
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.full)])
def test_gradients(world_size: int) -> None:
    every = world_size > 2
    assert compile_on_ranks(targets.gradients, world_size, "aot_eager", every) == [39 if every else 24] * world_size


@pytest.mark.full
def test_gradients_of_operations_with_a_root_and_of_uneven_parts() -> None:
    for eager, compiled in shared_ranks.run(operation_targets.derivatives, 2, timeout_s=200):
        assert eager == compiled


@pytest.mark.full
def test_gradients_of_fused_calls() -> None:
    compile_on_ranks(targets.fused_gradients, 2, "aot_eager")


@pytest.mark.full
def test_operators_pass_opcheck() -> None:
    checked = compile_on_ranks(targets.opcheck, 2)[0]
    assert len(checked) == 24


@pytest.mark.full
@pytest.mark.parametrize("backend", SOMETIMES)
def test_model(backend: str) -> None:
    assert compile_on_ranks(targets.model_equals_eager, 2, backend) == [2, 2]  # for inference and for training


@pytest.mark.full
@pytest.mark.parametrize("backend", BACKENDS)
def test_order_of_the_program(backend: str) -> None:
    """Without precautions, compilers drop the unused call, and Inductor runs the barrier first and the gathers last."""
    labels = compile_on_ranks(targets.order_of_the_program, 2, backend)
    assert labels[0] == labels[1]
    assert labels[0][:6] == ["all_to_all", "all_reduce", "barrier", "all_gather", "all_reduce", "reduce_scatter"]
    assert sorted(labels[0][6:]) == ["all_gather", "all_reduce", "all_reduce", "reduce_scatter"]  # in the backward


@pytest.mark.full
def test_graphs_name_rank_and_world_size() -> None:
    compile_on_ranks(targets.graph_arguments, 2)


@pytest.mark.full
def test_eager_calls_bypass_the_operators() -> None:
    compile_on_ranks(targets.operators_and_names, 2, "aot_eager")


@pytest.mark.full
def test_bad_calls() -> None:
    compile_on_ranks(targets.bad_calls, 2, "aot_eager")


@pytest.mark.full
def test_selective_checkpoints() -> None:
    compile_on_ranks(targets.checkpointed, 2, "aot_eager")


@pytest.mark.full
def test_order_that_cannot_be_kept_is_refused() -> None:
    message = shotcast.spawn(targets.error_without, 1, "Inductor's kernels", timeout_s=500)[0]
    assert "the order of calls in code of PyTorch" in message


@pytest.mark.full
def test_operators_that_cannot_be_ordered_are_refused(tmp_path: Path) -> None:
    code = """
        import torch.library
        del torch.library._register_effectful_op
        import shotcast, torch
        from shotcast.collectives.torch_ops import operators
        comm = shotcast.Communicator(device="cpu")
        assert comm.all_reduce(torch.ones(2)).tolist() == [1.0, 1.0]
        try:
            torch.compile(lambda x: comm.all_reduce(x), fullgraph=True, backend="aot_eager")(torch.ones(2))
        except Exception as error:
            print(error)
    """
    environment = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, **environment, "PYTHONPATH": str(Path(shotcast.__file__).parent.parent)},
    )
    assert result.returncode == 0, result.stderr
    assert "cannot order operators in a graph" in result.stdout
