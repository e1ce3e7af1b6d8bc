"""GGUF files: the same weights as Hugging Face's, whichever part is read and however they are stored."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType, GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st

from shotcast.errors import ConfigError, UnsupportedError
from shotcast.layers.rope import Rope
from shotcast.models.gguf_file import TYPES, GgufFile
from shotcast.models.gguf_header import GgufHeader
from shotcast.models.source import find_model, open_checkpoint

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB = 256, 8, 2, 32, 512, 64
NAMES = {
    "blk.0.attn_q.weight": "model.layers.0.self_attn.q_proj.weight",
    "blk.0.attn_k.weight": "model.layers.0.self_attn.k_proj.weight",
    "blk.0.attn_v.weight": "model.layers.0.self_attn.v_proj.weight",
    "blk.0.ffn_gate.weight": "model.layers.0.mlp.gate_proj.weight",
    "blk.0.ffn_down.weight": "model.layers.0.mlp.down_proj.weight",
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}
SHAPES = {
    "token_embd.weight": (VOCAB, HIDDEN),
    "output_norm.weight": (HIDDEN,),
    "blk.0.attn_norm.weight": (HIDDEN,),
    "blk.0.ffn_norm.weight": (HIDDEN,),
    "blk.0.attn_q.weight": (HEADS * HEAD_DIM, HIDDEN),
    "blk.0.attn_k.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
    "blk.0.attn_v.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
    "blk.0.attn_output.weight": (HIDDEN, HEADS * HEAD_DIM),
    "blk.0.ffn_gate.weight": (FFN, HIDDEN),
    "blk.0.ffn_up.weight": (FFN, HIDDEN),
    "blk.0.ffn_down.weight": (HIDDEN, FFN),
}
FLOATS = {
    "Q2_K": slice(80, 84),
    "Q3_K": slice(108, 110),
    "Q4_K": slice(0, 4),
    "Q5_K": slice(0, 4),
    "Q6_K": slice(208, 210),
    "IQ4_NL": slice(0, 2),
    "IQ4_XS": slice(0, 2),
}
"""The float16 numbers in a block."""
Written = dict[str, tuple[np.ndarray, GGMLQuantizationType]]
"""The content of a file: rows of bytes or numbers, and their type."""


def stored(values: np.ndarray, kind: GGMLQuantizationType, numbers: np.random.Generator) -> np.ndarray:
    if kind.name in FLOATS:
        # the package cannot quantise to these types, but any bytes are weights if the scales among them are finite
        block, nbytes = gguf.GGML_QUANT_SIZES[kind]
        blocks = numbers.integers(0, 256, (*values.shape[:-1], values.shape[-1] // block, nbytes), dtype=np.uint8)
        scales = FLOATS[kind.name]
        blocks[..., scales] = np.frombuffer(
            np.float16([0.01] * ((scales.stop - scales.start) // 2)).tobytes(), np.uint8
        )
        return blocks.reshape(*values.shape[:-1], -1)
    return gguf.quants.quantize(values, kind)


def write(
    path: Path,
    kind: str = "F32",
    architecture: str = "llama",
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, tuple[int, ...]] | None = None,
) -> Written:
    """Write a model of one layer. ``metadata`` adds to the fields of the architecture; None leaves a key out."""
    numbers = np.random.default_rng(0)
    writer = GGUFWriter(path, architecture)
    said: dict[str, Any] = {
        "block_count": 1,
        "context_length": 128,
        "embedding_length": HIDDEN,
        "feed_forward_length": FFN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 1e6,
    } | (metadata or {})
    for key, value in said.items():
        name = f"{architecture}.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif value is not None:
            writer.add_array(name, value)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(3)
    written: Written = {}
    for name, shape in (SHAPES | (tensors or {})).items():
        values = numbers.standard_normal(shape).astype(np.float32)
        of = GGMLQuantizationType[kind] if len(shape) > 1 else GGMLQuantizationType.F32
        written[name] = stored(values, of, numbers), of
        writer.add_tensor(name, written[name][0], raw_dtype=of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written


def whole(written: Written, name: str) -> torch.Tensor:
    """Return a tensor by the gguf package's own dequantisation."""
    data, kind = written[name]
    return torch.from_numpy(gguf.quants.dequantize(data, kind).copy())


def halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Return rows in the order of Hugging Face: pairs (0, 1), (2, 3), ... of a head become (0, d/2), (1, d/2 + 1),
    ..."""
    return weight.view(heads, HEAD_DIM // 2, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[GgufFile, Written]]:
    folder = tmp_path_factory.mktemp("gguf")
    found = {}
    for kind in TYPES:
        written = write(folder / f"{kind}.gguf", kind)
        found[kind] = GgufFile(folder / f"{kind}.gguf"), written
    return found


@pytest.mark.every(6)
@given(data=st.data())
@pytest.mark.parametrize("kind", TYPES)
def test_any_part_is_that_part(files: dict[str, tuple[GgufFile, Written]], kind: str, data: st.DataObject) -> None:
    checkpoint, written = files[kind]
    theirs = data.draw(st.sampled_from(sorted(NAMES)))
    expected = whole(written, theirs)
    if ".attn_q." in theirs or ".attn_k." in theirs:
        expected = halves(expected, HEADS if ".attn_q." in theirs else KV_HEADS)

    def part(size: int) -> slice | None:
        first = data.draw(st.integers(0, size))
        return data.draw(st.sampled_from([None, slice(first, data.draw(st.integers(first, size)))]))

    rows = part(expected.shape[0])
    columns = part(expected.shape[1]) if expected.dim() > 1 else None
    expected = expected[rows or slice(None)]
    if columns is not None:
        expected = expected[:, columns]
    found = checkpoint.read(NAMES[theirs], rows, columns)
    is_matrix = expected.dim() > 1
    assert found.dtype == {"F16": torch.float16, "BF16": torch.bfloat16}.get(kind if is_matrix else "", torch.float32)
    assert torch.equal(found.float(), expected)
    assert found.is_contiguous()
    assert found.untyped_storage().nbytes() == found.nbytes


@pytest.mark.parametrize("kind", TYPES)
def test_configuration(files: dict[str, tuple[GgufFile, Written]], kind: str) -> None:
    config = files[kind][0].config
    assert (config.hidden, config.intermediate, config.layers, config.vocab) == (HIDDEN, FFN, 1, VOCAB)
    assert (config.heads, config.kv_heads, config.head_dim) == (HEADS, KV_HEADS, HEAD_DIM)
    assert (config.norm_eps, config.rope, config.max_position) == (1e-5, Rope(1e6), 128)
    assert (config.family, config.tied, config.eos) == ("llama", True, (2, 3))
    assert config.dtype == {"F16": "float16", "BF16": "bfloat16"}.get(kind, "float32")


def test_biases_and_an_output_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    biases = {f"blk.0.attn_{name}.bias": SHAPES[f"blk.0.attn_{name}.weight"][:1] for name in "qkv"}
    written = write(path, tensors=biases | {"output.weight": (VOCAB, HIDDEN)})
    checkpoint = open_checkpoint(str(path))
    assert (checkpoint.config.attention_bias, checkpoint.config.output_bias, checkpoint.config.tied) == (
        True,
        False,
        False,
    )
    found = checkpoint.read("model.layers.0.self_attn.q_proj.bias", slice(3, 40))
    assert torch.equal(found, halves(whole(written, "blk.0.attn_q.bias"), HEADS)[3:40])
    assert torch.equal(checkpoint.read("model.layers.0.self_attn.v_proj.bias"), whole(written, "blk.0.attn_v.bias"))


def test_qwen_is_stored_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    norms = {f"blk.0.attn_{name}_norm.weight": (HEAD_DIM,) for name in "qk"}
    written = write(path, "F16", "qwen3", tensors=norms)
    checkpoint = open_checkpoint(str(path))
    assert checkpoint.config.qk_norm
    assert checkpoint.config.family == "qwen3"
    found = checkpoint.read("model.layers.0.self_attn.q_proj.weight")
    assert torch.equal(found.float(), whole(written, "blk.0.attn_q.weight"))
    assert torch.equal(
        checkpoint.read("model.layers.0.self_attn.k_norm.weight"), whole(written, "blk.0.attn_k_norm.weight")
    )


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({}, Rope(1e6)),
        ({"rope.freq_base": None}, Rope(10000.0)),
        ({"rope.scaling.type": "none"}, Rope(1e6)),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}, Rope(1e6, "linear", 2.0)),
        ({"rope.scaling.factor": 2.0}, Rope(1e6, "linear", 2.0)),
        ({"rope.scale_linear": 2.0}, Rope(1e6, "linear", 2.0)),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32},
            Rope(1e6, "yarn", 4.0, original_max_position=32),
        ),
    ],
)
def test_rope(tmp_path: Path, metadata: dict[str, Any], expected: Rope) -> None:
    write(tmp_path / "model.gguf", metadata=metadata)
    config = GgufFile(tmp_path / "model.gguf").config
    assert config.rope == expected
    assert config.max_position == {"default": 128, "linear": 256, "yarn": 128}[expected.rope_type]


def test_divisors_of_frequencies(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(path, tensors={"rope_freqs.weight": (16,)})
    with pytest.raises(ConfigError, match="a divisor of rotary embedding"):
        GgufFile(path)
    write(path, metadata={"rope.scaling.factor": 2.0}, tensors={"rope_freqs.weight": (16,)})
    with pytest.raises(UnsupportedError, match="both by linear and by rope_freqs"):
        GgufFile(path)


def test_divisors_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np.random, "default_rng", lambda seed: _Ones())
    write(tmp_path / "model.gguf", tensors={"rope_freqs.weight": (16,)})
    checkpoint = GgufFile(tmp_path / "model.gguf")
    assert checkpoint.config.rope == Rope(1e6, divisors=(1.0,) * 16)
    assert "rope_freqs.weight" not in checkpoint.shapes


class _Ones:
    def standard_normal(self, shape: tuple[int, ...]) -> np.ndarray:
        return np.ones(shape)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"expert_count": 8}, "expert_count = 8"),
        ({"attention.scale": 0.5}, "attention.scale"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"attention.causal": False}, "causal"),
        ({"rope.dimension_sections": [2, 2]}, "dimension_sections"),
        ({"rope.dimension_count": 4}, "rope.dimension_count = 4; .* size of a head, 32"),
        ({"attention.value_length": 4}, "value_length"),
        ({"attention.head_count_kv": [2, 4]}, "head_count_kv layer by layer"),
        ({"rope.scaling.type": "longrope"}, "longrope, not supported; accepted"),
    ],
)
def test_what_is_not_implemented_is_refused(tmp_path: Path, metadata: dict[str, Any], message: str) -> None:
    write(tmp_path / "model.gguf", metadata=metadata)
    with pytest.raises(UnsupportedError, match=message):
        GgufFile(tmp_path / "model.gguf")


def test_architectures_and_types(tmp_path: Path) -> None:
    write(tmp_path / "gemma.gguf", architecture="gemma2")
    with pytest.raises(UnsupportedError, match=r"'gemma2'.*accepted: llama, qwen2, qwen3"):
        GgufFile(tmp_path / "gemma.gguf")
    write(tmp_path / "ternary.gguf", "TQ2_0")
    with pytest.raises(UnsupportedError, match=r"type TQ2_0, .*accepted: F32, F16, BF16, Q8_0"):
        GgufFile(tmp_path / "ternary.gguf")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [({"block_count": None}, "no llama.block_count"), ({"feed_forward_length": "many"}, "'many', which is no count")],
)
def test_metadata_is_complete(tmp_path: Path, metadata: dict[str, Any], message: str) -> None:
    write(tmp_path / "model.gguf", metadata=metadata)
    with pytest.raises(ConfigError, match=message):
        GgufFile(tmp_path / "model.gguf")


def test_unknown_tensors_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", tensors={"blk.0.ffn_sub_norm.weight": (FFN,)})
    with pytest.raises(ConfigError, match=r"does not ask for, such as blk.0.ffn_sub_norm.weight"):
        open_checkpoint(str(tmp_path / "model.gguf"))


@settings(max_examples=40)
@given(share=st.floats(0, 1, exclude_max=True))
def test_a_truncated_file_is_named(tmp_path_factory: pytest.TempPathFactory, share: float) -> None:
    folder = tmp_path_factory.mktemp("cut")
    write(folder / "model.gguf", "Q8_0")
    content = (folder / "model.gguf").read_bytes()
    (folder / "model.gguf").write_bytes(content[: int(len(content) * share)])
    with pytest.raises(ConfigError, match=r"model.gguf \(.*truncated"):
        GgufFile(folder / "model.gguf")


def test_other_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGML" + bytes(100))
    with pytest.raises(ConfigError, match="no GGUF file"):
        GgufFile(tmp_path / "model.gguf")
    with pytest.raises(ConfigError, match="cannot be read"):
        GgufFile(tmp_path / "absent.gguf")


def assert_as_the_package_reads(path: Path) -> None:
    """Compare metadata, except lists of strings, and tensor locations with the package's reader, which takes
    seconds."""
    header, theirs = GgufHeader.read(path), gguf.GGUFReader(path)
    known = {name: field for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    vocabularies = {name for name, field in known.items() if gguf.GGUFValueType.STRING in field.types[1:]}
    assert vocabularies
    assert header.metadata == {name: field.contents() for name, field in known.items() if name not in vocabularies}
    assert {name: (place.shape, place.type_number, place.offset) for name, place in header.tensors.items()} == {
        tensor.name: (tuple(tensor.shape[::-1].tolist()), int(tensor.tensor_type), tensor.data_offset)
        for tensor in theirs.tensors
    }


def test_a_vocabulary_is_passed_over(tmp_path: Path) -> None:
    plain, full = tmp_path / "plain.gguf", tmp_path / "full.gguf"
    write(plain)
    write(full, metadata={"words": ["word", "", "x" * 300, "ü"], "scores": [0.5, 1.5], "kinds": [1, 2, 3]})
    assert_as_the_package_reads(full)
    assert GgufFile(full).config == GgufFile(plain).config


@pytest.mark.full
def test_a_real_vocabulary_is_passed_over() -> None:
    assert_as_the_package_reads(find_model("smollm2"))


def altered(path: Path, old: bytes, new: bytes) -> Path:
    write(path)
    content = path.read_bytes()
    assert len(old) == len(new)
    assert old in content
    path.write_bytes(content.replace(old, new, 1))
    return path


@pytest.mark.parametrize(
    ("old", "new", "error", "message"),
    [
        (b"GGUF\3\0\0\0", b"GGUF\1\0\0\0", UnsupportedError, "version 1 of GGUF; accepted: 2 and 3"),
        (b"GGUF\3\0\0\0", b"GGUF\0\0\0\3", UnsupportedError, "the other byte order"),
        (b"blk.0.ffn_gate.weight", b"blk.0.ffn_down.weight", ConfigError, "'blk.0.ffn_down.weight' twice"),
        (b"llama.block_count\4", b"llama.block_count\x0d", ConfigError, "metadata is of type 13"),
        (b"block_count", b"block\xffcount", ConfigError, "utf-8"),
        (struct.pack("<Q", 17) + b"llama.block_count", b"\xff" * 8 + b"llama.block_count", ConfigError, "truncated"),
    ],
)
def test_a_damaged_header_is_named(tmp_path: Path, old: bytes, new: bytes, error: type, message: str) -> None:
    path = altered(tmp_path / "model.gguf", old, new)
    with pytest.raises(error, match=message):
        GgufFile(path)


@pytest.mark.full
@settings(max_examples=200)
@given(data=st.data())
def test_any_damage_before_the_weights_is_refused_or_can_be_read(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    write(path)
    content = bytearray(path.read_bytes())
    before = min(place.offset for place in GgufHeader.read(path).tensors.values())
    for place in data.draw(st.lists(st.integers(0, before - 1), min_size=1, max_size=4)):
        content[place] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    try_to_read(path)


WORDS = ["", "linear", "yarn"]
METADATA = st.one_of(
    st.booleans(),
    st.integers(0, 2**32 - 1),
    st.floats(width=32),
    st.sampled_from(WORDS),
    st.lists(st.integers(0, 9), min_size=1, max_size=3),
    st.none(),
)


@pytest.mark.full
@settings(max_examples=400)
@given(
    metadata=st.dictionaries(
        st.sampled_from(
            [
                *("block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count"),
                *("attention.head_count_kv", "attention.key_length", "attention.layer_norm_rms_epsilon"),
                *("attention.sliding_window", "rope.freq_base", "rope.scale_linear", "rope.scaling.type"),
                *("rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.yarn_beta_fast"),
                "rope.scaling.yarn_beta_slow",
            ]
        ),
        METADATA,
        max_size=3,
    ),
    scaling=st.sampled_from([{}, {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0}]),
)
def test_whatever_is_said_is_refused_or_can_be_read(
    tmp_path_factory: pytest.TempPathFactory, metadata: dict[str, Any], scaling: dict[str, Any]
) -> None:
    path = tmp_path_factory.getbasetemp() / "said.gguf"
    write(path, metadata=scaling | metadata)
    try_to_read(path)


def try_to_read(path: Path) -> None:
    try:
        checkpoint = open_checkpoint(str(path))
    except (ConfigError, UnsupportedError):
        return
    config = checkpoint.config
    assert config.rope.frequencies(config.head_dim, config.max_position).isfinite().all()
    for name in config.tensors():
        assert checkpoint.read(name).shape == checkpoint.shapes[name]
    checkpoint.close()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("general.architecture", ["llama"], r"architecture \['llama'\]"),
        ("split.count", "two", "one of two parts"),
        ("tokenizer.ggml.eot_token_id", "<s>", "eot_token_id = '<s>', which is no token"),
        ("tokenizer.ggml.eos_token_id", [2], r"eos_token_id = \[2\], which is no token"),
        ("tokenizer.ggml.eot_token_id", -1, "eot_token_id = -1, which is no token"),
        ("llama.rope.freq_base", "large", "freq_base = 'large', which is no number"),
        ("llama.rope.freq_base", 0.0, "theta of rotary embedding must be from 1e-18"),
        ("llama.attention.layer_norm_rms_epsilon", math.nan, "norm_eps"),
        ("llama.block_count", 1000, "layers of a model must be from 1 to 999"),
    ],
)
def test_what_makes_no_sense_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: Any, message: str
) -> None:
    write(tmp_path / "model.gguf")
    header = GgufHeader.read(tmp_path / "model.gguf")
    damaged = GgufHeader({**header.metadata, key: value}, header.tensors)
    monkeypatch.setattr(GgufHeader, "read", lambda _: damaged)
    with pytest.raises((ConfigError, UnsupportedError), match=message):
        open_checkpoint(str(tmp_path / "model.gguf"))


def test_one_of_several_parts(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "part.gguf", "llama")
    writer.add_uint16("split.count", 3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedError, match="one of 3 parts"):
        GgufFile(tmp_path / "part.gguf")


def their_weights(path: Path) -> dict[str, torch.Tensor]:
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    found: dict[str, torch.Tensor] = model.state_dict()
    return found


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_weights_are_those_that_transformers_reads(tmp_path: Path, architecture: str) -> None:
    path = tmp_path / "model.gguf"
    more: dict[str, tuple[int, ...]] = {"output.weight": (VOCAB, HIDDEN)}
    if architecture == "qwen2":
        more |= {f"blk.0.attn_{name}.bias": SHAPES[f"blk.0.attn_{name}.weight"][:1] for name in "qkv"}
    write(path, "Q8_0", architecture, {"vocab_size": VOCAB}, more)
    checkpoint = open_checkpoint(str(path))
    theirs = their_weights(path)
    assert set(checkpoint.shapes) == set(theirs)
    for name, expected in theirs.items():
        assert torch.equal(checkpoint.read(name), expected), name


@pytest.mark.full
def test_a_real_model_has_the_weights_that_transformers_reads() -> None:
    checkpoint = open_checkpoint("smollm2")
    theirs = their_weights(find_model("smollm2"))
    for name in checkpoint.shapes:
        assert torch.equal(checkpoint.read(name), theirs[name]), name
    part = checkpoint.read("model.layers.7.self_attn.q_proj.weight", slice(320, 576), slice(100, 300))
    assert torch.equal(part, theirs["model.layers.7.self_attn.q_proj.weight"][320:576, 100:300])
