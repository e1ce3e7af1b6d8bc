"""A rank's part of a checkpoint: sliced, converted, joined; the parts add up to the whole."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from shotcast.layers import embedding
from shotcast.layers.linear import Linear, RowShard, column_parallel, row_parallel
from shotcast.layers.weights import Weights


class Memory:
    """Named tensors, and a record of what was read."""

    def __init__(self, **tensors: torch.Tensor):
        self.tensors = tensors
        self.read_shapes: list[tuple[int, ...]] = []

    def read(self, name: str, rows: slice | None = None, columns: slice | None = None) -> torch.Tensor:
        part = self.tensors[name][rows or slice(None)]
        part = part if columns is None else part[:, columns]
        self.read_shapes.append(tuple(part.shape))
        return part.clone()


def weights_of(source: Memory, dtype: torch.dtype = torch.float32, read: list[int] | None = None) -> Weights:
    counted: list[int] = [] if read is None else read
    return Weights(source, dtype, torch.device("cpu"), counted.append)


def test_part_is_converted_and_counted() -> None:
    source = Memory(a=torch.randn(6, 8, dtype=torch.float64))
    read: list[int] = []
    part = weights_of(source, torch.bfloat16, read).load("a", slice(1, 4), slice(2, 8))
    assert torch.equal(part, source.tensors["a"][1:4, 2:8].bfloat16())
    assert source.read_shapes == [(3, 6)]
    assert read == [3 * 6 * 2]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_columns_then_rows_add_up_to_the_whole(ranks: int) -> None:
    torch.manual_seed(0)
    source = Memory(
        **{"up.weight": torch.randn(7, 5), "up.bias": torch.randn(7), "down.weight": torch.randn(4, 7)},
        **{"down.bias": torch.randn(4)},
    )
    x = torch.randn(3, 5)
    whole = x @ source.tensors["up.weight"].T + source.tensors["up.bias"]
    whole = whole @ source.tensors["down.weight"].T + source.tensors["down.bias"]
    bounds = [7 * rank // ranks for rank in range(ranks + 1)]
    total = torch.zeros(3, 4)
    for rank in range(ranks):
        mine = range(bounds[rank], bounds[rank + 1])
        weights = weights_of(source)
        up = column_parallel(weights, [RowShard("up", mine)], bias=True)
        down = row_parallel(weights, "down", mine, bias=True, rank=rank)
        assert up.weight.shape == (len(mine), 5)
        assert down.weight.shape == (4, len(mine))
        total += down(up(x))
    torch.testing.assert_close(total, whole)


def test_several_matrices_become_one() -> None:
    source = Memory(**{"a.weight": torch.randn(4, 3), "b.weight": torch.randn(6, 3)})
    joined = column_parallel(weights_of(source), [RowShard("a", range(1, 3)), RowShard("b", range(2, 6))])
    assert torch.equal(joined.weight, torch.cat((source.tensors["a.weight"][1:3], source.tensors["b.weight"][2:6])))
    assert joined.bias is None


def test_the_head_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that steps make no layer: on a GPU, a layer has memory of its own."""
    made: list[torch.Tensor] = []

    def linear(weight: torch.Tensor) -> Linear:
        made.append(weight)
        return Linear(weight)

    monkeypatch.setattr(embedding, "Linear", linear)
    source = Memory(head=torch.randn(6, 4))
    alone = SimpleNamespace(size=1, rank=0, gather_columns=lambda part, widths: part.flatten())
    head = embedding.VocabParallelEmbedding(weights_of(source), "head", 6, alone)  # type: ignore[arg-type]
    x = torch.randn(2, 4)
    for _ in range(2):
        torch.testing.assert_close(head.logits(x).values, x @ source.tensors["head"].T)
    assert len(made) == 1
