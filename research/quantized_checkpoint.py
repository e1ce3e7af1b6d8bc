"""A checkpoint of random weights in the shape of a Llama preset, quantized as published ones are, to measure with.

    python research/quantized_checkpoint.py PRESET[:LAYERS] awq|gptq|fp8|fp8-blocks|bf16-cycles FOLDER
    shotcast bench engine FOLDER

8B in 4 bits take 6 GB of the disk. ``bf16-cycles`` is not quantized: its layers add little, and its head makes each
token be followed by the next of its cycle of 32 tokens, so that n-grams predict its greedy text.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from shotcast.models.config import ModelConfig
from shotcast.models.presets import preset
from shotcast.models.safetensors_folder import INDEX

GROUP, BLOCK = 128, 128
DEVIATION = 0.02
CYCLE = 32
CYCLES = "bf16-cycles"
FORMATS: dict[str, dict[str, Any]] = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True},
    "fp8": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"weights": {"type": "float", "num_bits": 8, "strategy": "channel"}}},
    },
    "fp8-blocks": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]},
}
"""The ``quantization_config`` of each format."""


def stored(outputs: int, inputs: int, form: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a random matrix, by their last names."""
    if form.startswith("fp8"):
        values = torch.randn(outputs, inputs).to(torch.float8_e4m3fn)
        if form == "fp8":
            return {"weight": values, "weight_scale": torch.full((outputs, 1), DEVIATION)}
        blocks = -(-outputs // BLOCK), -(-inputs // BLOCK)
        return {"weight": values, "weight_scale_inv": torch.full(blocks, DEVIATION)}

    def words(*shape: int) -> torch.Tensor:
        return torch.randint(-(1 << 31), 1 << 31, shape).to(torch.int32)

    groups = -(-inputs // GROUP)
    shape = (inputs, outputs // 8) if form == "awq" else (inputs // 8, outputs)
    scales = torch.full((groups, outputs), DEVIATION / 6.5).half()  # of the difference of two codes
    return {"qweight": words(*shape), "qzeros": words(groups, outputs // 8), "scales": scales}


def before_each(embeddings: torch.Tensor) -> torch.Tensor:
    """Return the embedding of the token before each in its cycle, which the logits of a head compare with."""
    tokens = torch.arange(len(embeddings))
    first = tokens // CYCLE * CYCLE
    length = (len(embeddings) - first).clamp(max=CYCLE)
    return embeddings[first + (tokens - first - 1) % length]


def write(config: ModelConfig, form: str, folder: Path) -> None:
    """Write config.json, a file of the tensors outside the layers, and one of each layer."""
    folder.mkdir(parents=True)
    if form == CYCLES:
        config = replace(config, tied=False)
    said = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": config.hidden,
        "intermediate_size": config.intermediate,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta,
        "max_position_embeddings": config.max_position,
        "tie_word_embeddings": config.tied,
        "dtype": "bfloat16",
    }
    if form in FORMATS:
        said["quantization_config"] = FORMATS[form]
    (folder / "config.json").write_text(json.dumps(said, indent=1))
    shapes, weight_map = config.tensors(), dict[str, str]()
    parts: dict[str, list[str]] = {}
    for name in shapes:
        parts.setdefault(name.split(".")[2] if ".layers." in name else "others", []).append(name)
    for part, names in parts.items():
        tensors: dict[str, torch.Tensor] = {}
        for name in names:
            shape = shapes[name]
            if part != "others" and len(shape) == 2 and form in FORMATS:
                stem = name.removesuffix(".weight")
                tensors |= {f"{stem}.{kind}": tensor for kind, tensor in stored(*shape, form).items()}
            else:
                tensors[name] = torch.randn(shape).mul_(DEVIATION).add_(len(shape) == 1).bfloat16()
        if form == CYCLES and part == "others":
            tensors["lm_head.weight"] = before_each(tensors["model.embed_tokens.weight"])
        elif form == CYCLES:
            for name in names:
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    tensors[name] *= 1e-4
        file = f"model-{part}.safetensors"
        save_file(tensors, folder / file)
        weight_map |= dict.fromkeys(tensors, file)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("preset")
    parser.add_argument("format", choices=(*FORMATS, CYCLES))
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    write(preset(given.preset), given.format, given.folder)


if __name__ == "__main__":
    main()
