"""A family of the Llama kind is one description: registered here, it is read from both formats and run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from families_targets import ALPACA, NAMES, logits_of_registered
from safetensors.torch import load_file, save_file
from test_gguf_file import SHAPES, write
from transformers import LlamaConfig, LlamaForCausalLM

import shotcast
from shotcast.errors import UnsupportedError
from shotcast.models import families
from shotcast.models.gguf_file import GgufFile
from shotcast.models.source import open_checkpoint
from shotcast.models.weight_names import GGUF_LLAMA, HF_LLAMA

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
PROMPTS = [[5, 9, 3, 60, 2, 7, 7], [1, 2, 3]]


@pytest.fixture
def alpaca(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add the family in this process, for one test."""
    monkeypatch.setitem(families.FAMILIES, ALPACA.name, ALPACA)


def save(folder: Path) -> list[torch.Tensor]:
    """Save a tiny Llama with biases as a model of the family; return the logits that Transformers computes."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True, initializer_range=0.3)).float().eval()
    for layer in model.model.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
            torch.nn.init.normal_(projection.bias)
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    renamed = {HF_LLAMA.translate(name, NAMES): tensor for name, tensor in weights.items()}
    # of this family, the projection after attention has no bias
    save_file(
        {name: tensor for name, tensor in renamed.items() if "o_proj.bias" not in name}, folder / "model.safetensors"
    )
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["AlpacaForCausalLM"], "model_type": "alpaca"}
    del config["attention_bias"]
    (folder / "config.json").write_text(json.dumps(config))
    with torch.inference_mode():
        return [model(torch.tensor([prompt])).logits[0] for prompt in PROMPTS]


def test_a_registered_family_runs(alpaca: None, tmp_path: Path) -> None:
    wanted = save(tmp_path)
    checkpoint = open_checkpoint(str(tmp_path))
    assert checkpoint.config.family == "alpaca"
    assert (checkpoint.config.attention_bias, checkpoint.config.output_bias) == (True, False)
    assert "decoder.layers.1.attention.to_q.bias" in checkpoint.shapes
    checkpoint.close()
    (found, other) = shotcast.spawn(logits_of_registered, 2, str(tmp_path), PROMPTS, timeout_s=300)
    assert all(map(torch.equal, found, other))
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours - theirs).abs().max() < 1e-4 * theirs.abs().max()


def test_a_registered_family_is_read_from_gguf(alpaca: None, tmp_path: Path) -> None:
    biases = {f"blk.0.attn_{name}.bias": SHAPES[f"blk.0.attn_{name}.weight"][:1] for name in "qkv"}
    written = write(tmp_path / "model.gguf", architecture="alpaca", tensors=biases)
    checkpoint = open_checkpoint(str(tmp_path / "model.gguf"))
    assert checkpoint.config.family == "alpaca"
    # in the order of the file: this family is not interleaved
    found = checkpoint.read("decoder.layers.0.attention.to_q.weight")
    assert torch.equal(found, torch.from_numpy(written["blk.0.attn_q.weight"][0]))


def test_an_unregistered_family_is_refused(tmp_path: Path) -> None:
    save(tmp_path)
    with pytest.raises(UnsupportedError, match="AlpacaForCausalLM is not supported; accepted: LlamaForCausalLM"):
        open_checkpoint(str(tmp_path))
    write(tmp_path / "model.gguf", architecture="alpaca")
    with pytest.raises(UnsupportedError, match="'alpaca', which is not supported; accepted: llama, qwen2, qwen3"):
        GgufFile(tmp_path / "model.gguf")


def test_names_are_translated_both_ways() -> None:
    for name, translated in (
        ("blk.12.attn_q.weight", "model.layers.12.self_attn.q_proj.weight"),
        ("blk.0.ffn_down.bias", "model.layers.0.mlp.down_proj.bias"),
        ("output.weight", "lm_head.weight"),
    ):
        assert GGUF_LLAMA.translate(name, HF_LLAMA) == translated
        assert HF_LLAMA.translate(translated, GGUF_LLAMA) == name
    for name in ("rope_freqs.weight", "blk.0.output.weight", "blk.x.attn_q.weight", "attn_q.weight", "blk.0.attn_q"):
        assert GGUF_LLAMA.translate(name, HF_LLAMA) == name
