"""Reading config.json, and refusing what would be computed wrongly."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from shotcast.errors import ConfigError, UnsupportedError
from shotcast.layers.rope import Rope
from shotcast.models.config import ModelConfig
from shotcast.models.hf_config import read_hf_config

TINY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 128,
}
FAMILIES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "phi3": "Phi3",
    "olmo2": "Olmo2",
    "gemma2": "Gemma2",
    "gemma3_text": "Gemma3",
}
TOKENS = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}


def said(family: str = "llama", **changes: Any) -> dict[str, Any]:
    """Make a config.json; a change to ... leaves the key out."""
    whole = TINY | {"architectures": [f"{FAMILIES[family]}ForCausalLM"], "model_type": family} | changes
    return {key: value for key, value in whole.items() if value is not ...}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"head_dim": 6}),
        ("mistral", {"head_dim": 16}),
        ("qwen2", {}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {}),
        ("qwen3", {"head_dim": 12, "attention_bias": True}),
        ("phi3", TOKENS),
        ("olmo2", {}),
        ("olmo2", {"attention_bias": True, "num_key_value_heads": 4}),
        ("gemma2", {"attention_bias": True}),
        ("gemma3_text", {"head_dim": 12}),
    ],
)
def test_tensors_are_those_of_transformers(family: str, changes: dict[str, Any]) -> None:
    kind = "Gemma3Text" if family == "gemma3_text" else FAMILIES[family]
    theirs = getattr(transformers, f"{kind}Config")(**TINY | changes)
    model = transformers.AutoModelForCausalLM.from_config(theirs)
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if theirs.tie_word_embeddings:
        del expected["lm_head.weight"]
    config = read_hf_config(theirs.to_dict() | {"architectures": [type(model).__name__]})
    assert config.tensors() == expected
    assert config.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert config.family == family
    assert config.norm_eps == theirs.rms_norm_eps
    own = [config.window_of(layer) for layer in range(2)]
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention" if config.sliding_window else "full"] * 2
    assert own == [theirs.sliding_window if kind == "sliding_attention" else None for kind in kinds]


def test_what_is_not_said_is_what_transformers_assumes() -> None:
    config = read_hf_config(said(num_key_value_heads=...))
    assert (config.kv_heads, config.norm_eps, config.rope) == (4, 1e-6, Rope(10000.0))
    assert (config.tied, config.attention_bias, config.dtype, config.eos) == (False, False, "float32", ())
    assert read_hf_config(said("qwen3")).head_dim == 128
    assert read_hf_config(said("olmo2")).norm_eps == 1e-5
    assert read_hf_config(said(num_key_value_heads=None)).kv_heads == 4


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("kind", "parameters", "expected"),
    [
        ("default", {}, Rope(5e5)),
        ("linear", {"factor": 2}, Rope(5e5, "linear", 2.0)),
        ("dynamic", {"factor": 2}, Rope(5e5, "dynamic", 2.0, original_max_position=128)),
        ("llama3", LLAMA3, Rope(5e5, "llama3", 8.0, 1.0, 4.0, 64)),
        ("yarn", YARN, Rope(5e5, "yarn", 4.0, original_max_position=32)),
        (
            "yarn",
            YARN | {"attention_factor": 0.75, "beta_fast": 16, "beta_slow": 2},
            Rope(5e5, "yarn", 4.0, original_max_position=32, attention_factor=0.75, beta_fast=16.0, beta_slow=2.0),
        ),
        ("yarn", {"original_max_position_embeddings": 32}, Rope(5e5, "yarn", 4.0, original_max_position=32)),
        ("yarn", {"factor": 2.0}, Rope(5e5, "yarn", 2.0, original_max_position=128)),
    ],
)
def test_rope_of_both_styles(kind: str, parameters: dict[str, Any], expected: Rope) -> None:
    new = {"rope_parameters": {"rope_type": kind, "rope_theta": 5e5, **parameters}}
    old = {"rope_theta": 5e5, "rope_scaling": {"rope_type": kind, **parameters}}
    older = {"rope_theta": 5e5, "rope_scaling": {"type": kind, **parameters}}
    assert [read_hf_config(said(**style)).rope for style in (new, old, older)] == [expected] * 3


# Qwen2.5's model card shows this block for contexts beyond 32768 tokens.
QWEN_YARN = {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}
LLAMA31 = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


@pytest.mark.parametrize(
    ("family", "max_position", "scaling", "expected"),
    [
        ("qwen2", 32768, None, 32768),
        ("qwen2", 32768, QWEN_YARN, 131072),
        ("qwen3", 131072, QWEN_YARN, 131072),
        ("llama", 163840, {"type": "yarn", "original_max_position_embeddings": 4096}, 163840),
        ("llama", 100, {"type": "yarn", "original_max_position_embeddings": 33}, 100),
        ("llama", 131072, LLAMA31, 131072),
        ("llama", 4096, {"type": "linear", "factor": 4.0}, 16384),
        ("llama", 2048, {"type": "linear", "factor": 2.5}, 5120),
        ("llama", 4096, {"type": "dynamic", "factor": 2.0}, 8192),
        ("llama", 4096, {"rope_type": "default"}, 4096),
    ],
)
def test_the_context_is_that_of_stretched_positions(
    family: str, max_position: int, scaling: dict[str, Any] | None, expected: int
) -> None:
    config = read_hf_config(said(family, max_position_embeddings=max_position, rope_scaling=scaling))
    assert config.max_position == expected


def test_yarn_scales_as_it_says() -> None:
    rope = {"rope_type": "yarn", "mscale": 1.0, "mscale_all_dim": 0.5, **YARN}
    found = read_hf_config(said(rope_scaling=rope)).rope.attention_factor
    assert found == pytest.approx((0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1))


def test_the_original_length_may_stand_outside() -> None:
    rope = {"rope_type": "llama3", **LLAMA3}
    config = read_hf_config(said(rope_scaling=rope, original_max_position_embeddings=16))
    assert config.rope.original_max_position == 16


@pytest.mark.parametrize(
    ("family", "changes", "window"),
    [
        ("llama", {"sliding_window": 8}, None),
        ("mistral", {}, 4096),
        ("mistral", {"sliding_window": 8}, 8),
        ("mistral", {"sliding_window": None}, None),
        ("qwen2", {"sliding_window": 8}, None),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": False, "max_window_layers": 1}, None),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0}, 8),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2}, None),
        ("qwen3", {"sliding_window": 8, "use_sliding_window": True, "layer_types": ["sliding_attention"] * 2}, 8),
        ("qwen3", {"sliding_window": None, "layer_types": ["full_attention"] * 2}, None),
    ],
)
def test_sliding_window(family: str, changes: dict[str, Any], window: int | None) -> None:
    assert read_hf_config(said(family, **changes)).sliding_window == window


def test_windows_of_some_layers() -> None:
    def windows(family: str, **changes: Any) -> list[int | None]:
        config = read_hf_config(said(family, sliding_window=8, **changes))
        return [config.window_of(layer) for layer in range(config.layers)]

    assert windows("qwen2", use_sliding_window=True, max_window_layers=1) == [None, 8]
    assert windows("qwen3", use_sliding_window=True, layer_types=MIXED) == [None, 8]
    assert windows("gemma2", num_hidden_layers=3) == [8, None, 8]
    assert windows("gemma2", layer_types=MIXED) == [None, 8]
    assert windows("gemma3_text", num_hidden_layers=7) == [8] * 5 + [None, 8]
    assert windows("gemma3_text", sliding_window_pattern=2) == [8, None]
    assert read_hf_config(said("gemma2")).longest_window is None
    assert read_hf_config(said("mistral")).longest_window == 4096


def test_gemma_reads_what_it_scales_and_caps() -> None:
    config = read_hf_config(said("gemma2", query_pre_attn_scalar=64, final_logit_softcapping=None))
    assert (config.attention_scale, config.attention_cap, config.logit_cap) == (0.125, 50.0, 0.0)
    assert (config.embedding_scale, config.norms_less_one, config.activation) == (32**0.5, True, "gelu_tanh")
    assert (config.tied, config.head_dim) == (True, 256)
    third = read_hf_config(said("gemma3_text", final_logit_softcapping=20.0))
    assert (third.attention_scale, third.attention_cap, third.logit_cap) == (0.0625, 0.0, 20.0)


def test_layers_with_windows_of_gemma_3_rotate_otherwise() -> None:
    linear = {"rope_type": "linear", "factor": 8.0}
    old = read_hf_config(said("gemma3_text", rope_theta=2e6, rope_local_base_freq=2e4, rope_scaling=linear))
    both = {"full_attention": {"rope_theta": 2e6, **linear}, "sliding_attention": {"rope_theta": 2e4}}
    new = read_hf_config(said("gemma3_text", rope_parameters=both))
    assert (old.rope, old.local_rope) == (new.rope, new.local_rope) == (Rope(2e6, "linear", 8.0), Rope(2e4))
    assert old.max_position == 128  # stretched already
    plain = read_hf_config(said("gemma3_text"))
    assert (plain.rope, plain.local_rope) == (Rope(1e6), Rope(1e4))


def test_longrope() -> None:
    factors = {"short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [2, 3, 4, 5]}
    expected = Rope(
        5e5,
        "longrope",
        original_max_position=32,
        attention_factor=math.sqrt(1 + math.log(4) / math.log(32)),
        divisors=(2.0, 3.0, 4.0, 5.0),
        short_divisors=(1.0, 1.5, 2.0, 2.5),
    )
    for kind in ("longrope", "su", "yarn"):  # as published, with the name of today, and two former ones
        config = said(
            "phi3", rope_theta=5e5, original_max_position_embeddings=32, rope_scaling={"type": kind, **factors}
        )
        assert read_hf_config(config).rope == expected
    assert read_hf_config(config).max_position == 128
    short, long = expected.frequencies(8, 32), expected.frequencies(8, 33)
    assert torch.allclose(short / long, torch.tensor([2.0, 2.0, 2.0, 2.0]))
    given = {"attention_factor": 1.25, **factors}
    assert read_hf_config(said("phi3", rope_scaling={"type": "longrope", **given})).rope.magnitude() == 1.25


def test_end_tokens_of_both_files() -> None:
    assert read_hf_config(said(eos_token_id=2, bos_token_id=1), {"eos_token_id": [5, 2]}).eos == (2, 5)
    assert read_hf_config(said(eos_token_id=-1)).eos == ()


@pytest.mark.parametrize(("key", "value"), [("dtype", "bfloat16"), ("torch_dtype", "torch.float16")])
def test_dtype_of_both_styles(key: str, value: str) -> None:
    assert read_hf_config(said(**{key: value})).dtype == value.removeprefix("torch.")


MIXED = ["full_attention", "sliding_attention"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (said(architectures=["MixtralForCausalLM"]), "MixtralForCausalLM is not supported; accepted: LlamaForCausalLM"),
        (said(architectures=["Qwen2VLForConditionalGeneration"]), "Qwen2VL.*accepted: Llama"),
        (said(architectures=[], model_type="gemma3"), "gemma3.*accepted"),
        (said(architectures=[], model_type=["llama"]), r"\['llama'\].*accepted"),
        (said(hidden_act="gelu"), "hidden_act 'gelu'.*accepted: silu"),
        (said(quantization_config={"quant_method": "bitsandbytes"}), "quantized .*bitsandbytes.*GGUF"),
        (said(rope_interleaved=True), "rope_interleaved"),
        (said(rope_scaling={"type": "mrope", "factor": 2.0}), "'mrope' is not supported; accepted: default, linear"),
        (said(rope_scaling={"type": "default", "mrope_section": [1, 2]}), "mrope_section"),
        (said(rope_parameters={"full_attention": {"rope_theta": 1e4}}), "differ between layers"),
        (said(partial_rotary_factor=0.5), "partial_rotary_factor 0.5"),
        (said(rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5}), "partial_rotary_factor 0.5"),
        (said(rope_scaling={"type": "yarn", "truncate": False, **YARN}), "truncate"),
        (
            said("qwen2", layer_types=["full_attention", "linear_attention"], use_sliding_window=True),
            "linear_attention",
        ),
        (said("gemma2", layer_types=["full_attention", "chunked_attention"]), "chunked_attention is not supported"),
        (said("gemma2", hidden_activation="gelu"), "hidden_activation 'gelu'.*accepted: gelu_pytorch_tanh"),
        (said("gemma2", use_bidirectional_attention=True), "use_bidirectional_attention"),
        (said("gemma3_text", attn_logit_softcapping=50.0), "attn_logit_softcapping of Gemma 3"),
        (said("phi3", partial_rotary_factor=0.75), "partial_rotary_factor 0.75"),
        (said("qwen3", layer_types=MIXED), "without sliding_window"),
        (said("mistral", layer_types=MIXED), "same attention in all layers"),
        (said("mistral", layer_types=["full_attention"] * 2), "same attention in all layers"),
        (said(dtype="float8_e4m3fn"), "float8_e4m3fn.*accepted: float32"),
    ],
)
def test_what_is_not_implemented_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        read_hf_config(config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (said("qwen2", num_key_value_heads=...), "no num_key_value_heads"),
        (said(num_key_value_heads=3), "4 heads cannot share 3"),
        (said(hidden_size=30), "does not divide"),
        (said(head_dim=7), "even"),
        (said(rms_norm_eps=-1e-5), "rms_norm_eps.*above 0"),
        (said(rope_theta="10000"), "rope_theta"),
        (said(rope_scaling={"type": "linear"}), "no factor"),
        (said(rope_scaling={"type": "dynamic"}), "no factor"),
        (said(rope_scaling={"type": "dynamic", "factor": 2.0}, head_dim=2), "head_dim must be above 2"),
        (said(rope_scaling="linear"), "rope_parameters"),
        (said(rope_scaling={"type": "llama3", **LLAMA3, "low_freq_factor": 4.0}), "below high_freq_factor"),
        (said(eos_token_id="</s>"), "eos_token_id"),
        (said("mistral", sliding_window=0), "sliding_window"),
        (said("gemma2", sliding_window=None), "no sliding_window"),
        (said("gemma2", attn_logit_softcapping=-1.0), "attn_logit_softcapping.*above 0"),
        (said("gemma2", layer_types=["full_attention"] * 3), "layer_types in config.json has 3 layers, not 2"),
        (said("phi3", rope_scaling={"type": "longrope", "short_factor": [1.0] * 4}), "no long_factor"),
        (
            said("phi3", rope_scaling={"type": "longrope", "short_factor": [1.0] * 3, "long_factor": [1.0] * 4}),
            "takes 4 divisors, half of head_dim, not 3",
        ),
        (
            said("phi3", rope_scaling={"type": "longrope", "short_factor": 1.0, "long_factor": [1.0] * 4}),
            "short_factor in config.json must be a list of numbers",
        ),
        (said(architectures="LlamaForCausalLM"), "architectures in config.json must be a list of names"),
        (said(architectures=[{}]), "architectures in config.json must be a list of names"),
        (said("qwen3", layer_types=[[]]), "layer_types in config.json must be a list of names"),
        (said("mistral", layer_types=7), "layer_types in config.json must be a list of names"),
        (said(hidden_size=1 << 31), "hidden_size.* to 2147483647, not 2147483648"),
        (said(num_hidden_layers=1000), "layers of a model must be from 1 to 999, not 1000"),
        (said(vocab_size=1 << 40000), "vocab_size.*not one of 40001 bits"),
        (said(rms_norm_eps=1 << 2000), "rms_norm_eps.*not one of 2001 bits"),
    ],
)
def test_what_makes_no_sense_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_hf_config(config)


@given(
    key=st.sampled_from([key for key in TINY if key != "num_key_value_heads"]),
    value=st.one_of(st.just(...), st.none(), st.integers(max_value=0), st.floats(), st.text(), st.booleans()),
)
def test_sizes_are_whole_numbers(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=key):
        read_hf_config(said(**{key: value}))


KEYS = [
    *TINY,
    *("architectures", "model_type", "head_dim", "rms_norm_eps", "tie_word_embeddings", "attention_bias", "mlp_bias"),
    *("rope_theta", "rope_scaling", "rope_parameters", "rope_interleaved", "partial_rotary_factor"),
    *("original_max_position_embeddings", "layer_types", "sliding_window", "use_sliding_window", "max_window_layers"),
    *("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar", "rope_local_base_freq"),
    *("sliding_window_pattern", "hidden_activation"),
    *("hidden_act", "quantization_config", "dtype", "torch_dtype", "bos_token_id", "eos_token_id"),
]
NUMBERS = st.one_of(st.integers(), st.floats(), st.sampled_from([0, 1, 8.0, 1e-300, 10**400]))
SCALING = st.fixed_dictionaries(
    {"rope_type": st.sampled_from(["default", "linear", "dynamic", "llama3", "yarn", "longrope"])},
    optional=dict.fromkeys(
        [*LLAMA3, *YARN, "rope_theta", "beta_fast", "beta_slow", "mscale", "attention_factor"], NUMBERS
    ),
)
ANYTHING = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=3), SCALING),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(KEYS), inner, max_size=3)),
    max_leaves=4,
)


@pytest.mark.full
@settings(max_examples=400)
@given(
    family=st.sampled_from(list(FAMILIES)),
    changes=st.dictionaries(st.sampled_from(KEYS), ANYTHING, max_size=3),
    generation=st.dictionaries(st.just("eos_token_id"), ANYTHING),
)
def test_whatever_is_said_is_refused_or_can_be_computed(
    family: str, changes: dict[str, Any], generation: dict[str, Any]
) -> None:
    try:
        config = read_hf_config(said(family, **changes), generation)
    except (ConfigError, UnsupportedError):
        return
    for rope in (config.rope, config.local_rope or config.rope):
        assert rope.frequencies(config.head_dim, config.max_position).isfinite().all()
        assert math.isfinite(rope.magnitude())
    assert config.tensors()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 0}, "layers"),
        ({"rope": Rope(1e4, divisors=(1.0,))}, "4 divisors"),
        ({"norm_eps": 0.0}, "norm_eps must be above 0"),
        ({"norm_eps": math.nan}, "norm_eps must be above 0"),
        ({"layers": 1000}, "layers .* from 1 to 999"),
        ({"hidden": 1 << 31}, "hidden .* to 2147483647"),
    ],
)
def test_a_configuration_is_possible(changes: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {
        "hidden": 32,
        "intermediate": 48,
        "layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 8,
        "vocab": 64,
        "norm_eps": 1e-6,
        "rope": Rope(1e4),
        "max_position": 128,
        "tied": False,
    }
    assert ModelConfig(**given).parameters > 0
    with pytest.raises(ConfigError, match=message):
        ModelConfig(**given | changes)


def test_dtypes_are_torch_types() -> None:
    assert getattr(torch, read_hf_config(said(dtype="bfloat16")).dtype) is torch.bfloat16
