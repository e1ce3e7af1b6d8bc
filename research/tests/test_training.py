"""research/training.py: the layers, the check of gradients, and all forms on CPU ranks."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import training
import training_targets as targets
from training_forms import NONE, distance, named_average

from shotcast.errors import RankFailed
from shotcast.launcher.spawn import spawn

SETTING = training.Setting(("data", "sharded", "tensor"), "tiny", 1, 32, 16, "cpu", "float32", rounds=1, repeats=1)


@pytest.mark.full
def test_all_forms_are_checked_and_timed() -> None:
    rows = spawn(training.rows, 2, SETTING, timeout_s=300)[0]
    found = {(row.set, row.form): row for row in rows}
    data = ("DDP, nothing sent", "DDP", "DDP, 100 MB", "DDP by shotcast", "DDP by shotcast, 100 MB")
    sharded = ("FSDP2", "FSDP2 by shotcast", "FSDP2 by shotcast, in mapped memory")
    tensor = ("library, sequential", "library, overlapped")
    assert [form for name, form in found if name == "data"] == [NONE, *data]
    assert [form for name, form in found if name == "sharded"] == [NONE, *sharded]
    assert [form for name, form in found if name == "tensor"] == [NONE, *tensor, "ours, sequential", "ours"]
    assert all(row.step_us is not None and row.off is not None and row.off < 1e-5 for row in rows), rows
    assert [found[name, NONE].exposed_us for name in SETTING.sets] == [0, 0, 0]
    assert found["tensor", "ours, sequential"].off == 0
    assert len(training.sentences(rows)) == 3


@pytest.mark.full
def test_divided_layers_compute_what_whole_ones_do() -> None:
    for output, gradients in spawn(targets.of_whole_and_of_parts, 2, timeout_s=300):
        assert output < 1e-12
        assert gradients < 1e-12


@pytest.mark.full
def test_another_gradient_is_not_timed() -> None:
    with pytest.raises(RankFailed, match="gradients are off by"):
        spawn(targets.not_averaged, 2, dataclasses.replace(SETTING, sets=("data",)), timeout_s=300)


def test_the_named_order_is_that_of_ranks() -> None:
    xs = [torch.tensor([one]) for one in (1e8, -1e8, 3.0)]
    assert named_average(xs) == 1
    assert named_average([xs[0], xs[2], xs[1]]) == 0
    assert distance([torch.tensor([3.0, 4.0])], [torch.tensor([3.0, 3.0])]) == pytest.approx(1 / 18**0.5)


def test_what_is_said() -> None:
    row = training.Row("data", NONE, "", 100.0, 0.0, 0.0)
    ddp = training.Row("data", "DDP", "library", 150.0, 50.0, 0.0)
    ours = training.Row("data", "ours", "own", 125.0, 25.0, 0.0)
    absent = training.Row("data", "DDP, priority", "library", reason="no NCCL")
    assert training.sentences([row, ddp, ours, absent]) == [
        "data: DDP, priority: not available: no NCCL",
        "data: ours takes 0.833 of DDP; 50% less exposed communication",
    ]
