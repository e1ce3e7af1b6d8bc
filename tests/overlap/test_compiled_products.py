"""Products with collectives under torch.compile(fullgraph=True): the same bits and gradients as eager code."""

from __future__ import annotations

import shutil
from pathlib import Path

import compiled_products_targets as targets
import pytest

import shared_ranks

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler on the CPU")
BACKENDS = ["aot_eager", pytest.param("inductor", marks=[needs_compiler, pytest.mark.full])]


@pytest.fixture(autouse=True)
def empty_inductor_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")


@pytest.mark.full
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_layer_of_products_is_one_graph(backend: str) -> None:
    shared_ranks.run(targets.fullgraph, 2, backend, timeout_s=200)


@pytest.mark.full
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=needs_compiler)])
def test_gradients(backend: str) -> None:
    shared_ranks.run(targets.gradients, 2, backend, timeout_s=200)


@pytest.mark.full
def test_operators() -> None:
    for said in shared_ranks.run(targets.opcheck, 2, timeout_s=200):
        assert "needs lanes, which an operator of a graph does not have" in said[0]
        assert "does not fit" in said[1]
        assert "out is contiguous" in said[2]
        assert "are not divisible among 2 ranks" in said[3]
        assert "way is 'other'" in said[4]
