"""Models with experts: every parameter is Transformers' own, and what plans do not price is refused by its name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from experts.model import EXPERT_PRESETS, ExpertModel, Experts, read_planned_config
from experts.plan import plan
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_experts import named_model

from shotcast.errors import ConfigError, UnsupportedError
from shotcast.hardware import cluster
from shotcast.models.hf_config import read_hf_config
from shotcast.models.presets import PRESETS
from shotcast.planner.calibration import load
from shotcast.planner.plan import Query

QWEN3 = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
"""Qwen/Qwen3-30B-A3B, config.json."""


def parameters(config: Any) -> dict[str, tuple[int, ...]]:
    """Return the parameters of Transformers' model, without memory for them."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def hf_config(model: ExpertModel) -> Any:
    """Return the configuration of Transformers for a preset."""
    common = {
        "vocab_size": model.vocab,
        "hidden_size": model.hidden,
        "intermediate_size": model.intermediate,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "num_experts_per_tok": model.experts.per_token,
    }
    if model.latent is not None:
        config = transformers.DeepseekV3Config(**common)
        assert config.n_routed_experts == model.experts.number
        return config
    if model.family == "mixtral":
        return transformers.MixtralConfig(**common, num_local_experts=model.experts.number)
    return transformers.Qwen3MoeConfig(
        **common, num_experts=model.experts.number, moe_intermediate_size=model.experts.intermediate
    )


@pytest.mark.parametrize(
    ("name", "published", "active"),
    [
        # model cards: 46.7B with 12.9B a token (Mixtral, arXiv 2401.04088); 141B and 39B; 30.5B and 3.3B; 235B and 22B;
        # 671B and 37B (DeepSeek-V3, arXiv 2412.19437)
        ("mixtral-8x7b", 46.7e9, 12.9e9),
        ("mixtral-8x22b", 141e9, 39e9),
        ("qwen3-30b-a3b", 30.5e9, 3.3e9),
        ("qwen3-235b-a22b", 235e9, 22e9),
        ("deepseek-v3", 671e9, 37e9),
    ],
)
def test_presets_have_the_parameters_of_transformers(name: str, published: float, active: float) -> None:
    model = EXPERT_PRESETS[name]
    assert model.tensors() == parameters(hf_config(model))
    assert model.parameters == pytest.approx(published, rel=0.004)
    assert model.active_parameters == pytest.approx(active, rel=0.02)


@pytest.mark.parametrize(("step", "dense"), [(1, []), (2, [3]), (3, [0, 2])])
def test_qwen2_with_dense_layers_and_shared_experts(step: int, dense: list[int]) -> None:
    config = transformers.Qwen2MoeConfig(
        num_hidden_layers=7,
        decoder_sparse_step=step,
        mlp_only_layers=dense,
        hidden_size=128,
        vocab_size=512,
        num_attention_heads=4,
        num_key_value_heads=2,
        architectures=["Qwen2MoeForCausalLM"],
    )
    model = read_planned_config(config.to_dict())
    assert isinstance(model, ExpertModel)
    assert model.tensors() == parameters(config)
    assert model.expert_layers(range(7)) == 7 - len(model.experts.dense_layers)
    assert model.experts.shared == 5632


@pytest.mark.parametrize("rank", [None, 96])
@pytest.mark.parametrize("bias", [False, True])
def test_deepseek_with_latent_attention(rank: int | None, bias: bool) -> None:
    config = transformers.DeepseekV2Config(
        num_hidden_layers=4,
        first_k_dense_replace=1,
        q_lora_rank=rank,
        kv_lora_rank=64,
        num_experts_per_tok=6,
        hidden_size=256,
        vocab_size=512,
        num_attention_heads=4,
        attention_bias=bias,
        architectures=["DeepseekV2ForCausalLM"],
    )
    model = read_planned_config(config.to_dict())
    assert isinstance(model, ExpertModel)
    assert model.tensors() == parameters(config)
    assert model.experts.shared == 2 * 1407
    assert model.experts.dense_layers == {0}


DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
"""deepseek-ai/DeepSeek-V3, config.json."""


def test_config_files_are_the_presets() -> None:
    assert read_planned_config(QWEN3) == EXPERT_PRESETS["qwen3-30b-a3b"]
    assert read_planned_config(DEEPSEEK) == EXPERT_PRESETS["deepseek-v3"]
    nameless = {name: value for name, value in QWEN3.items() if name != "architectures"}
    assert read_planned_config(nameless) == EXPERT_PRESETS["qwen3-30b-a3b"]
    fields = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 14336, "hidden_size": 4096}
    mixtral = {
        "architectures": ["MixtralForCausalLM"],
        "max_position_embeddings": 32768,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "torch_dtype": "bfloat16",
        "vocab_size": 32000,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    assert read_planned_config(mixtral | fields) == EXPERT_PRESETS["mixtral-8x7b"]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"num_experts_per_tok": 129}, ConfigError, "a token cannot go to 129 of 128 experts"),
        ({"num_experts_per_tok": 0}, ConfigError, "num_experts_per_tok in config.json must be a whole number from 1"),
        ({"num_experts_per_tok": None}, ConfigError, "config.json has no num_experts_per_tok"),
        ({"num_experts": None}, ConfigError, "config.json has no num_experts"),
        ({"num_experts": 1, "num_experts_per_tok": 1}, ConfigError, "number of experts must be from 2"),
        ({"num_experts": 1 << 30, "num_experts_per_tok": 1 << 29}, ConfigError, "number of experts .* to 65536"),
        ({"moe_intermediate_size": "768"}, ConfigError, "moe_intermediate_size in config.json must be a whole number"),
        ({"mlp_only_layers": "all"}, ConfigError, "mlp_only_layers in config.json must be a list of numbers"),
        ({"mlp_only_layers": list(range(48))}, ConfigError, "no layer of the model has experts"),
        ({"decoder_sparse_step": 49}, ConfigError, "no layer of the model has experts"),
        ({"use_sliding_window": True, "layer_types": ["full_attention"]}, UnsupportedError, "different attention"),
        (
            {"architectures": ["DeepseekV32ForCausalLM"], "kv_lora_rank": 512},
            UnsupportedError,
            "DeepseekV32ForCausalLM has multi-head latent attention .MLA: kv_lora_rank 512. in a form that is not "
            "priced; accepted with experts: MixtralForCausalLM",
        ),
        (DEEPSEEK | {"kv_lora_rank": None}, ConfigError, "config.json has no kv_lora_rank"),
        (DEEPSEEK | {"topk_group": 9}, ConfigError, "256 experts in 8 groups, of which a token takes 9"),
        (DEEPSEEK | {"n_group": 7}, ConfigError, "256 experts in 7 groups"),
        (DEEPSEEK | {"n_group": 64, "topk_group": 1}, ConfigError, "cannot go to 8 experts.*have 4"),
        (DEEPSEEK | {"first_k_dense_replace": 61}, ConfigError, "no layer of the model has experts"),
        (
            DEEPSEEK | {"quantization_config": {"quant_method": "mxfp4"}},
            UnsupportedError,
            "quantization_config: 'mxfp4'",
        ),
        (
            {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": {"kv_lora_rank": 512}},
            UnsupportedError,
            "KimiK25ForConditionalGeneration has multi-head latent attention",
        ),
        (
            {"architectures": ["GptOssForCausalLM"], "num_local_experts": 32},
            UnsupportedError,
            "GptOssForCausalLM has experts .num_local_experts 32., and its architecture is not priced",
        ),
        (
            {"architectures": ["FalconForCausalLM"], "num_experts": 0},
            UnsupportedError,
            "architecture FalconForCausalLM",
        ),
    ],
)
def test_what_is_refused(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        read_planned_config(QWEN3 | changes)


VALUES = st.sampled_from([None, -1, 0, 1, 2, 3, 8, 61, 64, 128, 10**4, 2**31, 0.5, True, "8", [], [1], {}])


@given(st.sampled_from([QWEN3, DEEPSEEK]), st.data())
@settings(max_examples=60, deadline=None)
def test_whatever_is_said_is_refused_or_can_be_planned(config: dict[str, Any], data: st.DataObject) -> None:
    changed = data.draw(st.dictionaries(st.sampled_from(sorted(config)), VALUES, max_size=3))
    try:
        model = read_planned_config(config | {"max_position_embeddings": 4096} | changed)
        query = Query(model, "x", "", cluster.load("dgx-h200"), 2, 64, 16)
    except (ConfigError, UnsupportedError):
        return
    found = plan(query, load("NVIDIA H200"))
    assert all(0 < point.tpot_ms < math.inf and point.memory.cache(1) >= 0 for point in found.points)
    assert found.points or found.refused


def test_the_engine_still_refuses_experts() -> None:
    with pytest.raises(UnsupportedError, match="architecture Qwen3MoeForCausalLM is not supported"):
        read_hf_config(QWEN3)
    assert not set(EXPERT_PRESETS) & set(PRESETS)


def test_models_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    for name in (tmp_path, tmp_path / "config.json", "qwen3-30b-a3b"):
        assert named_model(str(name)) == EXPERT_PRESETS["qwen3-30b-a3b"]
    with pytest.raises(ConfigError, match=r"accepted: a preset \(mixtral-8x7b, "):
        named_model("mixtral-8x7")


def test_experts_share_their_limits() -> None:
    with pytest.raises(ConfigError, match="intermediate of experts must be from 1"):
        Experts(8, 2, 0)
