"""Hugging Face folders: every part of every tensor, and the errors for damaged files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from shotcast.errors import ConfigError, UnsupportedError
from shotcast.models.safetensors_folder import INDEX, SINGLE, SafetensorsFolder
from shotcast.models.source import open_checkpoint

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Tensors]:
    """Save the same model in one file and in several; return its tensors too."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        attention_bias=True,
        eos_token_id=2,
    )
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    folder = tmp_path_factory.mktemp("models")
    model.save_pretrained(folder / "one")
    model.save_pretrained(folder / "several", max_shard_size="10KB")
    assert len(list((folder / "several").glob("*.safetensors"))) > 2
    return folder / "one", folder / "several", {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.fixture
def one(saved: tuple[Path, Path, Tensors], tmp_path: Path) -> Path:
    """Copy the model, to be damaged."""
    return Path(shutil.copytree(saved[0], tmp_path / "one"))


@pytest.fixture
def several(saved: tuple[Path, Path, Tensors], tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved[1], tmp_path / "several"))


def test_everything_is_as_it_was_saved(saved: tuple[Path, Path, Tensors]) -> None:
    for folder in saved[:2]:
        checkpoint = open_checkpoint(str(folder))
        assert set(checkpoint.shapes) == set(saved[2])
        for name, tensor in saved[2].items():
            assert checkpoint.shapes[name] == tuple(tensor.shape)
            assert torch.equal(checkpoint.read(name), tensor)
        assert checkpoint.config.dtype == "bfloat16"
        assert checkpoint.config.eos == (2,)
        checkpoint.close()


# the list takes the place of the common one
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_any_part_is_that_part(saved: tuple[Path, Path, Tensors], data: st.DataObject) -> None:
    checkpoint = SafetensorsFolder(saved[1])
    name = data.draw(st.sampled_from(sorted(saved[2])))
    tensor = saved[2][name]

    def part(size: int) -> slice | None:
        first = data.draw(st.integers(0, size))
        return data.draw(st.sampled_from([None, slice(first, data.draw(st.integers(first, size)))]))

    rows = part(tensor.shape[0])
    columns = part(tensor.shape[1]) if tensor.dim() > 1 else None
    expected = tensor[rows or slice(None)]
    if columns is not None:
        expected = expected[:, columns]
    found = checkpoint.read(name, rows, columns)
    assert torch.equal(found, expected)
    assert found.is_contiguous()
    checkpoint.close()


def test_what_is_read_is_ones_own(saved: tuple[Path, Path, Tensors]) -> None:
    checkpoint = SafetensorsFolder(saved[0])
    name = "model.embed_tokens.weight"
    part = checkpoint.read(name, slice(3, 5))
    assert part.untyped_storage().nbytes() == part.nbytes
    part.zero_()
    assert torch.equal(checkpoint.read(name), saved[2][name])
    checkpoint.close()


def test_a_missing_tensor_is_named_with_close_ones(saved: tuple[Path, Path, Tensors]) -> None:
    checkpoint = SafetensorsFolder(saved[0])
    with pytest.raises(ConfigError, match=r"no tensor 'model.layers.1.self_attn.qproj.weight'.*self_attn.q_proj"):
        checkpoint.read("model.layers.1.self_attn.qproj.weight")
    with pytest.raises(ConfigError, match=r"\[64, 32\] in the checkpoint; by its configuration it is \[1, 2\]"):
        checkpoint.require("lm_head.weight", (1, 2))


def rewrite(folder: Path, change: Tensors | None = None, leave_out: str = "") -> None:
    tensors = load_file(folder / SINGLE) | (change or {})
    tensors.pop(leave_out, None)
    save_file(tensors, folder / SINGLE)


def test_tensors_are_those_of_the_configuration(one: Path) -> None:
    rewrite(one, {"lm_head.weight": torch.zeros(63, 32)})
    with pytest.raises(ConfigError, match=r"one: tensor 'lm_head.weight' is \[63, 32\]"):
        open_checkpoint(str(one))
    rewrite(one, leave_out="lm_head.weight")
    with pytest.raises(ConfigError, match=r"no tensor 'lm_head.weight'"):
        open_checkpoint(str(one))
    rewrite(one, {"lm_head.weight": torch.zeros(64, 32), "model.layers.0.mlp.up_proj.bias": torch.zeros(48)})
    with pytest.raises(ConfigError, match=r"does not ask for, such as model.layers.0.mlp.up_proj.bias"):
        open_checkpoint(str(one))


def test_harmless_leftovers_are_passed_over(one: Path) -> None:
    config = json.loads((one / "config.json").read_text())
    (one / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    rewrite(one, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)})
    assert open_checkpoint(str(one)).config.tied


def test_the_type_is_that_of_the_tensors_if_nothing_says_it(one: Path) -> None:
    config = json.loads((one / "config.json").read_text())
    config.pop("dtype", None)
    config.pop("torch_dtype", None)
    (one / "config.json").write_text(json.dumps(config))
    assert SafetensorsFolder(one).config.dtype == "bfloat16"


def test_integers_are_refused(one: Path) -> None:
    rewrite(one, {"lm_head.weight": torch.zeros(64, 32, dtype=torch.int8)})
    with pytest.raises(UnsupportedError, match=r"'lm_head.weight' .* type I8.*accepted: F32, F16, BF16"):
        SafetensorsFolder(one)


@pytest.mark.parametrize("left", [0, 5, 100, 0.5, -1])
def test_a_truncated_file_is_named(one: Path, left: float) -> None:
    content = (one / SINGLE).read_bytes()
    keep = left if isinstance(left, int) else int(len(content) * left)
    (one / SINGLE).write_bytes(content[:keep])
    with pytest.raises(ConfigError, match=r"one/model.safetensors \(.* truncated"):
        SafetensorsFolder(one)


def test_a_missing_shard_is_named(several: Path) -> None:
    shards = sorted(several.glob("*.safetensors"))
    shards[1].unlink()
    with pytest.raises(ConfigError, match=rf"lacks {shards[1].name}, of {len(shards)} files"):
        SafetensorsFolder(several)


def test_an_index_that_lies_is_named(several: Path) -> None:
    index = json.loads((several / INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    name = next(name for name, file in index["weight_map"].items() if file == files[0])
    index["weight_map"][name] = files[1]
    (several / INDEX).write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=f"{files[1]} lacks '{name}'"):
        SafetensorsFolder(several)
    index["weight_map"][name] = "../elsewhere.safetensors"
    (several / INDEX).write_text(json.dumps(index))
    with pytest.raises(ConfigError, match="no file of that folder"):
        SafetensorsFolder(several)
    (several / INDEX).write_text("{}")
    with pytest.raises(ConfigError, match="no weight_map"):
        SafetensorsFolder(several)


def test_pickles_are_refused_with_a_way_out(one: Path) -> None:
    (one / SINGLE).rename(one / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"pytorch_model.bin.*convert it to safetensors"):
        SafetensorsFolder(one)


def test_an_unsupported_architecture_is_named_before_its_weights_are_missed(one: Path) -> None:
    (one / SINGLE).unlink()
    (one / "config.json").write_text('{"architectures": ["MixtralForCausalLM"]}')
    with pytest.raises(UnsupportedError, match=r"MixtralForCausalLM is not supported; accepted: LlamaForCausalLM, "):
        SafetensorsFolder(one)


def test_what_is_looked_for_is_said(one: Path) -> None:
    (one / SINGLE).unlink()
    with pytest.raises(ConfigError, match=rf"neither {SINGLE} nor {INDEX}"):
        SafetensorsFolder(one)
    (one / SINGLE).write_bytes(b"")
    with pytest.raises(ConfigError, match="truncated"):
        SafetensorsFolder(one)
    (one / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"config.json holds no JSON object"):
        SafetensorsFolder(one)
    for text in ("{", "[" * 100_000):
        (one / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=r"config.json cannot be read as JSON"):
            SafetensorsFolder(one)
    (one / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"is not a checkpoint: it has no config.json"):
        SafetensorsFolder(one)
