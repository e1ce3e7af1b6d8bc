"""Models with a Mixture of Experts: their dimensions, read from ``config.json`` or by preset, only for plans.

In some layers, or in all, a router sends each token to a few of many feed-forward networks, the routed experts; shared
experts compute every token. The engine runs none of these models, and its reader of configurations refuses them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from shotcast.errors import ConfigError, UnsupportedError, shorten
from shotcast.layers.rope import Rope
from shotcast.models.config import ModelConfig
from shotcast.models.config_fields import MAX_COUNT, Fields, count, strings
from shotcast.models.families import QWEN2, QWEN3, ModelFamily
from shotcast.models.hf_config import read_hf_config

MAX_EXPERTS = 1 << 16
"""The most experts of a layer. A file with more is damaged."""


@dataclass(frozen=True, slots=True)
class Experts:
    """The feed-forward networks of the layers that have experts.

    Attributes:
        number: the routed experts of a layer.
        per_token: those of them that compute a token.
        intermediate: the width of each.
        shared: the width of the shared experts together; 0 for none.
        shared_gate: the result of the shared experts is weighted by a product with one output.
        dense_layers: the numbers of the layers that have a dense network instead.
        routing_groups, chosen_groups: a token's experts are in ``chosen_groups`` of ``routing_groups`` equal parts.
    """

    number: int
    per_token: int
    intermediate: int
    shared: int = 0
    shared_gate: bool = False
    dense_layers: frozenset[int] = frozenset()
    routing_groups: int = 1
    chosen_groups: int = 1

    def __post_init__(self) -> None:
        least = {"number": 2, "per_token": 1, "intermediate": 1, "shared": 0, "routing_groups": 1, "chosen_groups": 1}
        for name, smallest in least.items():
            value, most = getattr(self, name), MAX_EXPERTS if name == "number" else MAX_COUNT
            if not smallest <= value <= most:
                raise ConfigError(f"{name} of experts must be from {smallest} to {most}, not {shorten(value)}")
        if self.per_token > self.number:
            raise ConfigError(
                f"a token cannot go to {self.per_token} of {self.number} experts: at most to as many as there are"
            )
        if self.number % self.routing_groups or self.chosen_groups > self.routing_groups:
            raise ConfigError(
                f"{self.number} experts in {self.routing_groups} groups, of which a token takes {self.chosen_groups}: "
                "groups are of equal size, and a token takes at most all"
            )
        reached = self.number // self.routing_groups * self.chosen_groups
        if self.per_token > reached:
            raise ConfigError(
                f"a token cannot go to {self.per_token} experts, as the groups that it takes have {reached}"
            )


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """The dimensions of multi-head latent attention (MLA).

    Attributes:
        kv_rank: values of the latent of keys and values.
        query_rank: values of the latent of queries; None where these are computed at once.
        plain, position: dimensions of a head's queries and keys without positions, and with them.
        value: dimensions of a head's values.
    """

    kv_rank: int
    query_rank: int | None
    plain: int
    position: int
    value: int

    def matrices(self, hidden: int, heads: int) -> dict[str, tuple[int, int]]:
        """Return the matrices of some heads as [outputs, inputs], by Transformers' names."""
        queries, rank = heads * (self.plain + self.position), self.query_rank
        first = {"q_proj": (queries, hidden)}
        if rank is not None:
            first = {"q_a_proj": (rank, hidden), "q_b_proj": (queries, rank)}
        return first | {
            "kv_a_proj_with_mqa": (self.kv_rank + self.position, hidden),
            "kv_b_proj": (heads * (self.plain + self.value), self.kv_rank),
            "o_proj": (hidden, heads * self.value),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertModel(ModelConfig):
    """A decoder of the Llama kind with experts in some layers.

    ``intermediate`` is the width of the dense layers.

    Attributes:
        experts: of a layer.
        latent: its attention, if that is latent; then each head has keys of its own, of ``head_dim`` dimensions, which
            no cache holds.
    """

    experts: Experts
    latent: LatentAttention | None = None

    def __post_init__(self) -> None:
        ModelConfig.__post_init__(self)
        if not self.expert_layers(range(self.layers)):
            raise ConfigError("no layer of the model has experts, so it is a dense model")

    def expert_layers(self, layers: range) -> int:
        """Return how many of some layers have experts."""
        return sum(number not in self.experts.dense_layers for number in layers)

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return the name and shape of every parameter, as Transformers 5 has them."""
        names, experts, hidden = self.names, self.experts, self.hidden
        tensors = ModelConfig.tensors(self)
        if self.latent is not None:
            tensors = self._with_latent(tensors, self.latent)
        layer: dict[str, tuple[int, ...]] = {
            "mlp.gate.weight": (experts.number, hidden),
            "mlp.experts.gate_up_proj": (experts.number, 2 * experts.intermediate, hidden),
            "mlp.experts.down_proj": (experts.number, hidden, experts.intermediate),
        }
        if experts.shared:
            layer |= {
                f"mlp.{'shared_expert' if experts.shared_gate else 'shared_experts'}.{name}.weight": shape
                for name, shape in {
                    "gate_proj": (experts.shared, hidden),
                    "up_proj": (experts.shared, hidden),
                    "down_proj": (hidden, experts.shared),
                }.items()
            }
        if experts.shared_gate:
            layer["mlp.shared_expert_gate.weight"] = (1, hidden)
        for number in range(self.layers):
            if number not in experts.dense_layers:
                for name in (names.gate, names.up, names.down):
                    del tensors[f"{names.of_layer(number, name)}.weight"]
                tensors |= {names.of_layer(number, name): shape for name, shape in layer.items()}
        return tensors

    def _with_latent(self, tensors: dict[str, tuple[int, ...]], latent: LatentAttention) -> dict[str, tuple[int, ...]]:
        """Return tensors with latent attention in place of other attention."""
        layer: dict[str, tuple[int, ...]] = {
            f"self_attn.{name}.weight": shape for name, shape in latent.matrices(self.hidden, self.heads).items()
        }
        layer["self_attn.kv_a_layernorm.weight"] = (latent.kv_rank,)
        if latent.query_rank is not None:
            layer["self_attn.q_a_layernorm.weight"] = (latent.query_rank,)
        if self.attention_bias:
            biased = ("kv_a_proj_with_mqa", "o_proj", *(["q_a_proj"] if latent.query_rank is not None else []))
            layer |= {f"self_attn.{name}.bias": layer[f"self_attn.{name}.weight"][:1] for name in biased}
        others = {name: shape for name, shape in tensors.items() if ".self_attn." not in name}
        return others | {
            self.names.of_layer(number, name): shape for number in range(self.layers) for name, shape in layer.items()
        }

    @property
    def active_parameters(self) -> int:
        """The parameters that one token is computed with: all but the experts that it does not go to."""
        idle = (self.experts.number - self.experts.per_token) * 3 * self.hidden * self.experts.intermediate
        return self.parameters - self.expert_layers(range(self.layers)) * idle


class ExpertFamily(NamedTuple):
    """A family of models with experts.

    Attributes:
        base: everything but the experts.
        experts: reads them from ``config.json`` and the number of layers.
        latent: attention is latent.
    """

    base: ModelFamily
    experts: Callable[[Fields, int], Experts]
    latent: bool = False


def _mixtral(config: Fields, layers: int) -> Experts:
    return Experts(
        number=count(config, "num_local_experts"),
        per_token=count(config, "num_experts_per_tok"),
        intermediate=count(config, "intermediate_size"),
    )


def _qwen(config: Fields, layers: int) -> Experts:
    step = count(config, "decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(isinstance(each, bool) or not isinstance(each, int) for each in dense):
        raise ConfigError(f"mlp_only_layers in config.json must be a list of numbers of layers, not {shorten(dense)}")
    return Experts(
        number=_named(config, "num_experts", "num_local_experts"),
        per_token=count(config, "num_experts_per_tok"),
        intermediate=count(config, "moe_intermediate_size"),
        dense_layers=frozenset(number for number in range(layers) if number in dense or (number + 1) % step),
    )


def _qwen2(config: Fields, layers: int) -> Experts:
    return replace(_qwen(config, layers), shared=count(config, "shared_expert_intermediate_size"), shared_gate=True)


def _deepseek(config: Fields, layers: int) -> Experts:
    first, step = count(config, "first_k_dense_replace", 0, least=0), count(config, "moe_layer_freq", 1)
    width = count(config, "moe_intermediate_size")
    # DeepSeek-V2 names groups without taking them where its method is greedy
    in_groups = config.get("n_group") is not None and config.get("topk_method") != "greedy"
    return Experts(
        number=_named(config, "n_routed_experts", "num_local_experts"),
        per_token=count(config, "num_experts_per_tok"),
        intermediate=width,
        shared=width * count(config, "n_shared_experts", 0, least=0),
        dense_layers=frozenset(number for number in range(layers) if number < first or number % step),
        routing_groups=count(config, "n_group") if in_groups else 1,
        chosen_groups=count(config, "topk_group") if in_groups else 1,
    )


def _latent(config: Fields) -> LatentAttention:
    return LatentAttention(
        kv_rank=count(config, "kv_lora_rank"),
        query_rank=None if config.get("q_lora_rank") is None else count(config, "q_lora_rank"),
        plain=count(config, "qk_nope_head_dim"),
        position=count(config, "qk_rope_head_dim"),
        value=count(config, "v_head_dim"),
    )


def _named(config: Fields, *keys: str) -> int:
    """Return the count of the first of some keys that a config has."""
    return count(config, next((key for key in keys if config.get(key) is not None), keys[0]))


def _window(config: Fields, layers: int) -> int | None:
    """Read the window of Mixtral, which is none if config.json does not mention it."""
    return None if config.get("sliding_window") is None else count(config, "sliding_window")


def _window_if_used(config: Fields, layers: int) -> int | None:
    """Read the window of Qwen's, which holds in all layers with ``use_sliding_window``."""
    if not config.get("use_sliding_window"):
        return None
    if strings(config, "layer_types") or config.get("model_type") == "qwen2_moe":
        raise UnsupportedError(
            "layers with different attention (use_sliding_window of Qwen2-MoE) are not supported; accepted: the same "
            "attention in all layers"
        )
    return None if config.get("sliding_window", 4096) is None else count(config, "sliding_window", 4096)


_MIXTRAL = ModelFamily(name="mixtral", architecture="MixtralForCausalLM", attention_bias=False, sliding_window=_window)
_QWEN2_MOE = replace(
    QWEN2,
    name="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    gguf_architectures=(),
    sliding_window=_window_if_used,
    details=lambda config, layers: {},
)
_QWEN3_MOE = replace(
    QWEN3,
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    gguf_architectures=(),
    attention_bias="config",
    default_head_dim=None,
    sliding_window=_window_if_used,
    details=lambda config, layers: {},
)
_DEEPSEEK_V2, _DEEPSEEK_V3 = (
    ModelFamily(name=f"deepseek_{version.lower()}", architecture=f"Deepseek{version}ForCausalLM")
    for version in ("V2", "V3")
)
EXPERT_FAMILIES: Mapping[str, ExpertFamily] = {
    family.base.architecture: family
    for family in (
        ExpertFamily(_MIXTRAL, _mixtral),
        ExpertFamily(_QWEN2_MOE, _qwen2),
        ExpertFamily(_QWEN3_MOE, _qwen),
        ExpertFamily(_DEEPSEEK_V2, _deepseek, latent=True),
        ExpertFamily(_DEEPSEEK_V3, _deepseek, latent=True),
    )
}
_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""Fields of ``config.json`` that say how many experts a layer has."""


def read_planned_config(config: Fields) -> ModelConfig:
    """Read ``config.json`` of a model that plans price: one that the engine runs, or one with experts.

    Raises:
        ConfigError: a field is missing or makes no sense.
        UnsupportedError: the model computes something that plans do not price.
    """
    names = strings(config, "architectures") or [_architecture(config.get("model_type"))]
    if len(names) == 1 and (family := EXPERT_FAMILIES.get(names[0])):
        return _expert_model(family, config)
    nested = config.get("text_config")
    fields = {**nested, **config} if isinstance(nested, Mapping) else config
    name, accepted = ", ".join(names), f"accepted with experts: {', '.join(EXPERT_FAMILIES)}"
    if (rank := fields.get("kv_lora_rank")) is not None:
        raise UnsupportedError(
            f"{name} has multi-head latent attention (MLA: kv_lora_rank {shorten(rank)}) in a form that is not priced; "
            f"{accepted}"
        )
    if found := next((key for key in _COUNTS if fields.get(key)), None):
        raise UnsupportedError(
            f"{name} has experts ({found} {shorten(fields[found])}), and its architecture is not priced; {accepted}"
        )
    return read_hf_config(config)


def _expert_model(family: ExpertFamily, config: Fields) -> ExpertModel:
    latent = _latent(config) if family.latent else None
    fields = dict(config)
    if latent is not None:
        fields |= {"head_dim": latent.plain + latent.position, "num_key_value_heads": config.get("num_attention_heads")}
    quantised = config.get("quantization_config")
    if isinstance(quantised, Mapping) and quantised.get("quant_method") == "fp8":
        # weights are not read here, and their precision is a question to the plan
        del fields["quantization_config"]
    base = read_hf_config(fields, family=family.base)
    values: dict[str, Any] = {name: getattr(base, name) for name in ModelConfig.__dataclass_fields__}
    return ExpertModel(**values, experts=family.experts(config, base.layers), latent=latent)


def _architecture(model_type: object) -> str:
    """Return the architecture of a ``model_type``; its own text where it has no experts."""
    known = {family.base.name: name for name, family in EXPERT_FAMILIES.items()}
    return known.get(str(model_type), str(model_type))


def _mixtral_preset(hidden: int, intermediate: int, layers: int, heads: int, max_position: int) -> ExpertModel:
    return ExpertModel(
        hidden=hidden,
        intermediate=intermediate,
        layers=layers,
        heads=heads,
        kv_heads=8,
        head_dim=128,
        vocab=32000,
        norm_eps=1e-5,
        rope=Rope(1000000.0),
        max_position=max_position,
        tied=False,
        family="mixtral",
        eos=(2,),
        experts=Experts(number=8, per_token=2, intermediate=intermediate),
    )


def _qwen3_preset(hidden: int, intermediate: int, layers: int, heads: int, width: int) -> ExpertModel:
    return ExpertModel(
        hidden=hidden,
        intermediate=intermediate,
        layers=layers,
        heads=heads,
        kv_heads=4,
        head_dim=128,
        vocab=151936,
        norm_eps=1e-6,
        rope=Rope(1000000.0),
        max_position=40960,
        tied=False,
        qk_norm="head",
        family="qwen3_moe",
        eos=(151645,),
        experts=Experts(number=128, per_token=8, intermediate=width),
    )


_DEEPSEEK = ExpertModel(
    hidden=7168,
    intermediate=18432,
    layers=61,
    heads=128,
    kv_heads=128,
    head_dim=192,
    vocab=129280,
    norm_eps=1e-6,
    rope=Rope(10000.0, "yarn", 40.0, original_max_position=4096, attention_factor=1.0, beta_fast=32.0, beta_slow=1.0),
    max_position=163840,
    tied=False,
    family="deepseek_v3",
    eos=(1,),
    experts=Experts(
        number=256,
        per_token=8,
        intermediate=2048,
        shared=2048,
        dense_layers=frozenset(range(3)),
        routing_groups=8,
        chosen_groups=4,
    ),
    latent=LatentAttention(kv_rank=512, query_rank=1536, plain=128, position=64, value=128),
)
EXPERT_PRESETS: dict[str, ExpertModel] = {
    "mixtral-8x7b": _mixtral_preset(4096, 14336, 32, 32, 32768),  # mistralai/Mixtral-8x7B-v0.1
    "mixtral-8x22b": _mixtral_preset(6144, 16384, 56, 48, 65536),  # mistralai/Mixtral-8x22B-v0.1
    "qwen3-30b-a3b": _qwen3_preset(2048, 6144, 48, 32, 768),  # Qwen/Qwen3-30B-A3B
    "qwen3-235b-a22b": _qwen3_preset(4096, 12288, 94, 64, 1536),  # Qwen/Qwen3-235B-A22B
    "deepseek-v3": _DEEPSEEK,  # deepseek-ai/DeepSeek-V3
}
"""Dimensions of published models with experts, each from the config.json of the huggingface.co repository beside it."""
