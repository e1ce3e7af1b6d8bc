"""Logits against Hugging Face Transformers on the same weights, for every family and layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import parity_targets as targets
import pytest
import torch
import transformers

import shotcast

VOCAB = 203  # not a multiple of any unit or tile
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.3, 2.0],
    "long_factor": [1.2, 2.0, 4.0, 8.0],
}
TOKENS = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
SLIDING = ["sliding_attention"] * 2
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "llama-tied-scaled": ("Llama", {"tie_word_embeddings": True, "rope_scaling": LLAMA3}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 12}),
    "mistral": ("Mistral", {"sliding_window": 10, "head_dim": 16}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-yarn": ("Qwen2", {"rope_scaling": YARN}),
    "nine-heads": ("Llama", {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72}),
    "two-heads": ("Qwen2", {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 3}),
    "qwen2-windows": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "num_hidden_layers": 3},
    ),
    "qwen3": ("Qwen3", {"head_dim": 16, "num_attention_heads": 4}),
    "phi3": ("Phi3", {"sliding_window": 10, **TOKENS}),
    "phi3-short": ("Phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 128, **TOKENS}),
    "phi3-long": ("Phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 6, **TOKENS}),
    "olmo2": ("Olmo2", {"rms_norm_eps": 1e-3}),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 12,
            "query_pre_attn_scalar": 20,
            "sliding_window": 7,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 2.5,
        },
    ),
    "gemma3": (
        "Gemma3",
        {"head_dim": 12, "query_pre_attn_scalar": 20, "sliding_window": 7, "layer_types": ["full_attention", *SLIDING]},
    ),
    "gemma3-scaled": (
        "Gemma3",
        {
            "sliding_window": 7,
            "head_dim": 12,
            "final_logit_softcapping": 2.5,
            "num_hidden_layers": 7,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e4},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
            },
        },
    ),
}
LAYOUTS = [(1, 1), (2, 1), (3, 1), (4, 1), (1, 2), (1, 3), (2, 2), (3, 2)]


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in (40, 7, 23)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[torch.Tensor]]]:
    """Save a tiny model of each family by Transformers, with the logits that Transformers computes."""
    made = {}
    for name, (family, options) in FAMILIES.items():
        torch.manual_seed(0)
        kind = "Gemma3Text" if family == "Gemma3" else family
        config = getattr(transformers, f"{kind}Config")(**{**SIZES, **options})
        config._attn_implementation = "eager"  # the only one with soft caps
        model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
        for parameter in model.parameters():  # biases of 0 and norms of 1 would hide errors
            if parameter.dim() == 1:
                torch.nn.init.normal_(parameter, 0.7, 0.3)
        folder = tmp_path_factory.mktemp(name)
        model.save_pretrained(folder)
        with torch.inference_mode():
            made[name] = folder, [model(torch.tensor([prompt])).logits[0] for prompt in prompts()]
    return made


def run(folder: Path, layout: tuple[int, int], chunk: int = 9, decoded: int = 4, **options: Any) -> list[torch.Tensor]:
    tensor, stages = layout
    arguments = (str(folder), stages, prompts(), chunk, decoded, options)
    results = shotcast.spawn(targets.logits, tensor * stages, *arguments, timeout_s=500)
    last = results[-tensor:]
    for other in last[1:]:
        for ours, theirs in zip(last[0], other, strict=True):
            assert torch.equal(ours, theirs), "the ranks of a stage do not have the same logits"
    return last[0]


def assert_agree(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.shape == theirs.shape
        assert (ours - theirs).abs().max() < 1e-4 * theirs.abs().max()


@pytest.mark.parametrize("family", FAMILIES)
def test_families(folders: dict[str, tuple[Path, list[torch.Tensor]]], family: str) -> None:
    folder, wanted = folders[family]
    assert_agree(run(folder, (2, 1)), wanted)


@pytest.mark.full
@pytest.mark.parametrize("family", ["phi3", "olmo2", "gemma2", "gemma3"])
def test_fused_matrices_and_other_norms_in_layouts(
    folders: dict[str, tuple[Path, list[torch.Tensor]]], family: str
) -> None:
    folder, wanted = folders[family]
    for layout in ((1, 1), (1, 2), (2, 2), (4, 1)):
        assert_agree(run(folder, layout), wanted)


@pytest.mark.every(5)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout[0]}x{layout[1]}")
def test_layouts(folders: dict[str, tuple[Path, list[torch.Tensor]]], layout: tuple[int, int]) -> None:
    folder, wanted = folders["llama-tied-scaled"]
    assert_agree(run(folder, layout), wanted)


@pytest.mark.full
def test_more_ranks_than_key_value_heads_with_biases_and_head_norms(
    folders: dict[str, tuple[Path, list[torch.Tensor]]],
) -> None:
    for family in ("llama-biases", "qwen3", "qwen2"):
        folder, wanted = folders[family]
        assert_agree(run(folder, (4, 1)), wanted)


@pytest.mark.every(5)
@pytest.mark.parametrize(
    "layout",
    [(2, 1), (4, 1), (5, 1), (8, 1), (4, 2)],
    ids=lambda layout: f"{layout[0]}x{layout[1]}",
)
def test_heads_words_and_columns_that_no_number_of_ranks_divides(
    folders: dict[str, tuple[Path, list[torch.Tensor]]], layout: tuple[int, int]
) -> None:
    folder, wanted = folders["nine-heads"]
    assert_agree(run(folder, layout), wanted)


@pytest.mark.full
@pytest.mark.parametrize("layout", [(4, 1), (3, 2)])
def test_more_ranks_than_heads_and_columns(
    folders: dict[str, tuple[Path, list[torch.Tensor]]], layout: tuple[int, int]
) -> None:
    folder, wanted = folders["two-heads"]
    assert_agree(run(folder, layout), wanted)


@pytest.mark.parametrize(("ranks", "chunk", "decoded"), [(2, 100, 0), (3, 1, 1), (2, 4, 7)])
def test_chunks(folders: dict[str, tuple[Path, list[torch.Tensor]]], ranks: int, chunk: int, decoded: int) -> None:
    folder, wanted = folders["mistral"]
    assert_agree(run(folder, (ranks, 1), chunk, decoded), wanted)


def test_one_shot_and_two_shot_have_the_same_bits(folders: dict[str, tuple[Path, list[torch.Tensor]]]) -> None:
    folder, _ = folders["llama"]
    for one, two in zip(
        run(folder, (3, 1), algorithm="one_shot"), run(folder, (3, 1), algorithm="two_shot"), strict=True
    ):
        assert torch.equal(one, two)


@pytest.mark.parametrize("algorithm", ["ring", "vendor"])
def test_other_algorithms(folders: dict[str, tuple[Path, list[torch.Tensor]]], algorithm: str) -> None:
    folder, wanted = folders["qwen3"]
    assert_agree(run(folder, (3, 1), algorithm=algorithm), wanted)
