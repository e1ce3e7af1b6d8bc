"""Random checkpoints in quantized formats: the engine's readers take them, and their weights are of the usual size."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from quantized_checkpoint import DEVIATION, FORMATS, write

from shotcast.layers.quantized import Float8Rows, GroupedRows
from shotcast.models.presets import preset
from shotcast.models.source import open_checkpoint


@pytest.mark.parametrize("form", FORMATS)
def test_any_format_is_read(tmp_path: Path, form: str) -> None:
    config = replace(preset("llama-3.1-8b:2"), hidden=256, intermediate=384, heads=4, kv_heads=2, head_dim=64, vocab=96)
    write(config, form, tmp_path / "made")
    checkpoint = open_checkpoint(str(tmp_path / "made"))
    for name in ("model.layers.1.self_attn.k_proj.weight", "model.layers.0.mlp.down_proj.weight"):
        values = checkpoint.read(name)
        assert tuple(values.shape) == config.tensors()[name]
        assert 0.8 * DEVIATION < values.std() < 1.2 * DEVIATION
        kept = checkpoint.read_stored(name)
        assert isinstance(kept, Float8Rows if form == "fp8" else GroupedRows)
    assert checkpoint.config.layers == 2
    checkpoint.close()
