"""Quantized Hugging Face checkpoints: any part of a matrix, and logits in layouts, against packing and float64 here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from test_parity import assert_agree, prompts, run

from shotcast.errors import ConfigError, UnsupportedError
from shotcast.layers.linear import RowShard, _joined, column_parallel, row_parallel
from shotcast.layers.quantized import Float8Rows, GroupedRows
from shotcast.layers.weights import Weights
from shotcast.models.quantization_config import read_quantization
from shotcast.models.safetensors_folder import SafetensorsFolder

SIZES = {
    "vocab_size": 203,
    "hidden_size": 64,
    "intermediate_size": 88,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
}
Tensors = dict[str, torch.Tensor]
Quantized = tuple[torch.Tensor, Tensors]
"""The values of a matrix in float64, and the tensors that store it."""
numbers = torch.Generator().manual_seed(1)


def float8(weight: torch.Tensor, block: tuple[int, int], shape: tuple[int, ...], name: str) -> Quantized:
    """Scale each block to the range of e4m3."""
    outputs, inputs = weight.shape
    scale = torch.zeros(-(-outputs // block[0]), -(-inputs // block[1]))
    stored, exact = torch.empty(outputs, inputs, dtype=torch.float8_e4m3fn), torch.empty_like(weight).double()
    for row in range(scale.shape[0]):
        for column in range(scale.shape[1]):
            part = (
                slice(row * block[0], (row + 1) * block[0]),
                slice(column * block[1], (column + 1) * block[1]),
            )
            scale[row, column] = weight[part].abs().max() / 300
            stored[part] = (weight[part] / scale[row, column]).to(torch.float8_e4m3fn)
            exact[part] = stored[part].double() * scale[row, column].double()
    return exact, {"weight": stored, name: scale.reshape(shape or scale.shape)}


def per_tensor(weight: torch.Tensor) -> Quantized:
    exact, tensors = float8(weight, (1 << 20, 1 << 20), (1,), "weight_scale")
    return exact, tensors | {"input_scale": torch.tensor(0.5)}


def per_channel(weight: torch.Tensor) -> Quantized:
    return float8(weight, (1, 1 << 20), (weight.shape[0], 1), "weight_scale")


def per_block(weight: torch.Tensor) -> Quantized:
    return float8(weight, (24, 16), (), "weight_scale_inv")


def words(codes: list[list[int]], order: list[int]) -> torch.Tensor:
    """Pack rows of codes of 4 bits, eight neighbors a word; the code at ``order[i]`` is in bits 4 i to 4 i + 3."""
    packed = [
        [sum(row[first + place] << (4 * i) for i, place in enumerate(order)) for first in range(0, len(row), 8)]
        for row in codes
    ]
    return torch.tensor(packed, dtype=torch.int64).to(torch.uint32).view(torch.int32)


def int4(weight: torch.Tensor, group: int, shuffled: bool = False) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Return codes [outputs, inputs], what they stand for, and zeros and scales [groups, outputs] with the group of
    each input."""
    outputs, inputs = weight.shape
    groups = -(-inputs // group)
    codes = torch.randint(16, (outputs, inputs), generator=numbers)
    zeros = torch.randint(1, 16, (groups, outputs), generator=numbers)
    scales = (torch.rand(groups, outputs, generator=numbers) * 0.05 + 0.02).half()
    group_of = torch.arange(inputs) // group
    if shuffled:
        group_of = group_of[torch.randperm(inputs, generator=numbers)]
    exact = (codes - zeros[group_of].t()).double() * scales[group_of].t().double()
    return codes, exact, (zeros, scales, group_of)


def awq(weight: torch.Tensor) -> Quantized:
    codes, exact, (zeros, scales, _) = int4(weight, 32)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    packed = words(codes.t().tolist(), order)
    return exact, {"qweight": packed, "qzeros": words(zeros.tolist(), order), "scales": scales}


def gptq(weight: torch.Tensor, offset: int = 1, shuffled: bool = False, group: int = 32) -> Quantized:
    codes, exact, (zeros, scales, group_of) = int4(weight, group, shuffled)
    plain = list(range(8))
    return exact, {
        "qweight": words(codes.tolist(), plain).t().contiguous(),
        "qzeros": words((zeros - offset).tolist(), plain),
        "scales": scales,
        "g_idx": group_of.int(),
    }


class Format(NamedTuple):
    """A format, by what quantizes to it and what its config.json says."""

    quantize: Callable[[torch.Tensor], Quantized]
    said: dict[str, Any]


def compressed(strategy: str, **weights: Any) -> dict[str, Any]:
    group = {"weights": {"type": "float", "num_bits": 8, "symmetric": True, "strategy": strategy, **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {**group, "targets": ["Linear"]}},
        "ignore": ["lm_head"],
    }


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False}
FORMATS = {
    "fp8-tensor": Format(per_tensor, compressed("tensor")),
    "fp8-channel": Format(per_channel, compressed("channel")),
    "fp8-block": Format(per_block, {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [24, 16]}),
    "fp8-compressed-block": Format(
        lambda weight: float8(weight, (24, 16), (), "weight_scale"), compressed("block", block_structure=[24, 16])
    ),
    "fp8-wide": Format(
        lambda weight: float8(weight, (24, 32), (), "weight_scale_inv"),
        {"quant_method": "fp8", "weight_block_size": [24, 32]},
    ),
    "awq": Format(awq, {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}),
    "gptq": Format(gptq, {**GPTQ, "desc_act": False, "checkpoint_format": "gptq"}),
    "gptq-ordered": Format(lambda weight: gptq(weight, shuffled=True), {**GPTQ, "desc_act": True}),
    "gptq-v2": Format(lambda weight: gptq(weight, 0), {**GPTQ, "checkpoint_format": "gptq_v2"}),
    "gptq-whole": Format(lambda weight: gptq(weight, group=weight.shape[1]), {**GPTQ, "group_size": -1}),
}


def save(
    folder: Path, form: Format, family: str = "Llama", sizes: dict[str, Any] | None = None
) -> tuple[transformers.PreTrainedModel, Tensors]:
    """Save a tiny model in this format; return the one of the same values, and the exact values of its matrices."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES | (sizes or {}), pad_token_id=0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    model.save_pretrained(folder)
    tensors, exact = load_file(folder / "model.safetensors"), Tensors()
    for name, parameter in model.named_parameters():
        if name.endswith("proj.weight"):
            exact[name], stored = form.quantize(parameter.detach())
            parameter.data.copy_(exact[name])
            del tensors[name]
            tensors |= {f"{name.removesuffix('.weight')}.{kind}": tensor for kind, tensor in stored.items()}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    said = json.loads((folder / "config.json").read_text()) | {"quantization_config": form.said}
    (folder / "config.json").write_text(json.dumps(said))
    return model, exact


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Tensors]]:
    folders = {name: tmp_path_factory.mktemp(name) for name in FORMATS}
    return {name: (folders[name], save(folders[name], form)[1]) for name, form in FORMATS.items()}


@pytest.mark.every(8)
@pytest.mark.parametrize("form", FORMATS)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_part_is_that_part(saved: dict[str, tuple[Path, Tensors]], form: str, data: st.DataObject) -> None:
    folder, exact = saved[form]
    checkpoint = SafetensorsFolder(folder)
    checkpoint.verify()
    name = data.draw(st.sampled_from(sorted(exact)))

    def part(size: int) -> slice:
        first = data.draw(st.integers(0, size))
        return slice(first, data.draw(st.integers(first, size)))

    rows, columns = (part(size) for size in exact[name].shape)
    found = checkpoint.read(name, rows, columns)
    assert found.dtype == torch.float32
    assert found.is_contiguous()
    torch.testing.assert_close(found.double(), exact[name][rows, columns], rtol=2**-23, atol=0)
    checkpoint.close()


def values_of(stored: Float8Rows | GroupedRows) -> torch.Tensor:
    """Dequantize in float64."""
    if isinstance(stored, Float8Rows):
        return stored.values.double() * stored.scale.double()
    values, scales, zeros, group = stored
    if zeros is None:
        codes = values.double()
    else:
        blocks = values.unflatten(1, (-1, 16))  # code j of word w is that of input 16 * j + w
        codes = torch.stack([(blocks >> 4 * place) & 15 for place in range(8)], 2).flatten(1).double()
        codes = codes[:, : stored.shape[1]]
        codes -= zeros.double().t().repeat_interleave(group, 1)
    return codes * scales.double().t().repeat_interleave(group, 1)


@pytest.mark.parametrize(
    ("form", "group"),
    [("fp8-tensor", 0), ("fp8-channel", 0), ("fp8-wide", 32), ("awq", 32), ("gptq", 32), ("gptq-v2", 32)],
)
def test_stored_parts(saved: dict[str, tuple[Path, Tensors]], form: str, group: int) -> None:
    """Check parts that begin within a word of outputs, and groups of inputs that begin after others."""
    folder, exact = saved[form]
    checkpoint = SafetensorsFolder(folder)
    for name in ("model.layers.1.self_attn.q_proj.weight", "model.layers.0.mlp.gate_proj.weight"):
        for rows, columns in (
            (slice(0, 64), slice(0, 64)),
            (slice(5, 30), slice(0, 32)),
            (slice(8, 24), slice(32, 64)),
        ):
            found = checkpoint.read_stored(name, rows, columns)
            assert found is not None
            assert found.values.shape[0] == rows.stop - rows.start
            assert (found.group if isinstance(found, GroupedRows) else 0) == group
            torch.testing.assert_close(values_of(found), exact[name][rows, columns], rtol=1e-12, atol=0)
    checkpoint.close()


def test_stored_parts_have_smaller_groups_where_they_begin_within_one(tmp_path: Path) -> None:
    form = Format(lambda weight: gptq(weight, group=64), {**GPTQ, "group_size": 64})
    _, exact = save(tmp_path, form)
    checkpoint, name = SafetensorsFolder(tmp_path), "model.layers.0.self_attn.o_proj.weight"
    found = checkpoint.read_stored(name, None, slice(32, 64))
    assert isinstance(found, GroupedRows)
    assert found.group == 32
    torch.testing.assert_close(values_of(found), exact[name][:, 32:], rtol=1e-12, atol=0)
    checkpoint.close()


def test_what_kernels_cannot_multiply_is_read_as_values(saved: dict[str, tuple[Path, Tensors]]) -> None:
    for form, columns in (("gptq-ordered", slice(0, 64)), ("awq", slice(16, 64)), ("fp8-block", slice(0, 64))):
        checkpoint = SafetensorsFolder(saved[form][0])
        assert checkpoint.read_stored("model.layers.0.self_attn.q_proj.weight", None, columns) is None
        assert checkpoint.read_stored("model.norm.weight") is None
        checkpoint.close()


def test_layers_keep_what_is_stored(saved: dict[str, tuple[Path, Tensors]]) -> None:
    """Check joined rows, the part of a rank without heads, and formats that are not to be kept."""
    checkpoint, exact = SafetensorsFolder(saved["awq"][0]), saved["awq"][1]
    read: list[int] = []
    given = checkpoint, torch.bfloat16, torch.device("cpu"), read.append
    names = [f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up")]
    layer = column_parallel(Weights(*given, stored=(GroupedRows,)), [RowShard(name, range(8, 64)) for name in names])
    assert layer._grouped is not None
    wanted = torch.cat([exact[f"{name}.weight"][8:64] for name in names])
    torch.testing.assert_close(values_of(layer._grouped), wanted, rtol=1e-12, atol=0)
    assert layer._grouped.shape == (112, 64)
    assert sum(read) == sum(part.nbytes for part in layer._grouped if isinstance(part, torch.Tensor))
    output = "model.layers.0.self_attn.o_proj"
    zeros = row_parallel(Weights(*given, stored=(GroupedRows,)), output, range(0, 32), zeroed=True)
    assert zeros._grouped is not None
    assert not values_of(zeros._grouped).any()
    for stored in ((), (Float8Rows,)):
        plain = row_parallel(Weights(*given, stored=stored), output, range(0, 32))
        assert plain._grouped is None
        assert plain.weight.dtype == torch.bfloat16
    checkpoint.close()


def test_formats_are_not_joined() -> None:
    scaled = Float8Rows(torch.zeros(16, 64).to(torch.float8_e4m3fn), torch.zeros(16, 1))
    groups = [
        GroupedRows(torch.zeros(16, 8, dtype=torch.int32), torch.zeros(64 // group, 16), None, group)
        for group in (32, 64)
    ]
    with pytest.raises(ConfigError, match="some matrices of a layer are quantized and others are not"):
        _joined([torch.zeros(16, 64), scaled], torch.float32)
    with pytest.raises(ConfigError, match="in different formats"):
        _joined([*groups], torch.float32)


@pytest.mark.full
@pytest.mark.parametrize("form", ["fp8-block", "awq", "gptq-ordered"])
def test_layouts(tmp_path: Path, form: str) -> None:
    """Check layouts of which one divides groups, blocks and words between ranks."""
    model, _ = save(tmp_path, FORMATS[form])
    with torch.inference_mode():
        wanted = [model(torch.tensor([prompt])).logits[0] for prompt in prompts()]
    for layout in ((1, 1), (3, 1), (2, 2)):
        assert_agree(run(tmp_path, layout), wanted)


@pytest.mark.full
def test_joined_matrices(tmp_path: Path) -> None:
    model, _ = save(tmp_path, FORMATS["awq"], "Phi3")
    with torch.inference_mode():
        wanted = [model(torch.tensor([prompt])).logits[0] for prompt in prompts()]
    assert_agree(run(tmp_path, (3, 1)), wanted)


def test_the_dtype_is_that_of_the_other_tensors(saved: dict[str, tuple[Path, Tensors]]) -> None:
    checkpoint = SafetensorsFolder(saved["awq"][0])
    assert checkpoint.config.dtype == "float32"
    checkpoint.close()


@pytest.mark.parametrize(
    ("form", "change", "message"),
    [
        ("awq", {"scales": None}, r"has no model.layers.0.mlp.down_proj.scales, without which"),
        ("awq", {"scales": torch.ones(2, 64)}, r"is \[64, 88\] in groups of 32, which .*\[2, 64\].* do not fit"),
        ("gptq", {"g_idx": torch.full((88,), 3)}, "g_idx has groups beyond the 3"),
        ("gptq", {"g_idx": torch.zeros(87)}, r"\[87\] do not fit"),
        ("fp8-tensor", {"weight_scale": torch.ones(3)}, r"weight_scale is \[3\], which are no scales of \[64, 88\]"),
        ("fp8-block", {"weight_scale_inv": torch.ones(3, 5)}, r"no scales of \[64, 88\] in blocks of \[24, 16\]"),
        ("fp8-channel", {"weight_scale": None}, "has no model.layers.0.mlp.down_proj.weight_scale"),
        ("fp8-channel", {"weight_zero_point": torch.ones(1)}, "does not ask for, such as .*weight_zero_point"),
    ],
)
def test_damaged_checkpoints_are_refused(
    tmp_path: Path, form: str, change: dict[str, torch.Tensor | None], message: str
) -> None:
    save(tmp_path, FORMATS[form])
    tensors = load_file(tmp_path / "model.safetensors")
    for name, tensor in change.items():
        full = f"model.layers.0.mlp.down_proj.{name}"
        tensors |= {} if tensor is None else {full: tensor}
        if tensor is None:
            del tensors[full]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        SafetensorsFolder(tmp_path).verify()


WEIGHTS = {"type": "float", "num_bits": 8, "strategy": "channel"}


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("int8", "quantization_config: 'int8'"),
        ({"quant_method": ["awq"]}, r"quantization_config: \['awq'\]"),
        ({**GPTQ, "bits": 1 << 40000}, "bits one of 40001 bits"),
        ({"quant_method": "bitsandbytes"}, "bitsandbytes.*accepted: fp8, compressed-tensors, awq, gptq, weights"),
        ({**GPTQ, "bits": 8}, "bits 8 .*accepted: 4"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin'.*accepted: gptq, gptq_v2"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv'.*accepted: gemm"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2'.*accepted: e4m3"),
        (compressed("group"), "strategy 'group'.*accepted: tensor, channel, block"),
        (compressed("channel", type="int"), "type 'int'.*accepted: float"),
        (compressed("channel") | {"format": "pack-quantized"}, "format 'pack-quantized'.*accepted: float-quantized"),
        (compressed("channel") | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme .*accepted: None"),
        (
            compressed("channel")
            | {"config_groups": {"a": {"weights": WEIGHTS}, "b": {"weights": {**WEIGHTS, "block_structure": [8, 8]}}}},
            "different block_structure",
        ),
    ],
)
def test_other_formats_are_refused(said: Any, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        read_quantization({"quantization_config": said})


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({**GPTQ, "group_size": 0}, "group_size"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size .* two numbers"),
        ({"quant_method": "fp8", "weight_block_size": [128, "x"]}, "weight_block_size"),
        ({"quant_method": "compressed-tensors"}, "no config_groups"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": None}}}, "has no weights"),
    ],
)
def test_what_makes_no_sense_is_refused(said: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_quantization({"quantization_config": said})
