"""Formats of quantized Hugging Face checkpoints, as given by ``quantization_config`` in a config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shotcast.errors import ConfigError, UnsupportedError, shorten
from shotcast.models.config_fields import Fields, count


@dataclass(frozen=True, slots=True)
class Quantization:
    """The format given by ``quantization_config`` in a config.json."""

    method: str  # "fp8", "awq" or "gptq"
    # the rows and columns that share a scale in FP8; None for scales of outputs or of whole matrices
    block: tuple[int, int] | None = None
    group: int | None = None  # the inputs of a group in 4 bits; None for all
    zero_offset: int = 0  # what is to be added to stored zeros

    def weight_bytes(self) -> float:
        """Return the bytes per weight on GPUs, including its share of scales and zeros."""
        if self.method == "fp8":
            return 1 + (0 if self.block is None else 4 / self.block[1])
        return 0.5 + (0 if self.group is None else 3 / self.group)


def read_quantization(config: Fields) -> Quantization | None:
    """Read ``quantization_config`` from a config.json; None if there is none. Raises if it is not supported."""
    said = config.get("quantization_config")
    if not said:
        return None
    method = said.get("quant_method") if isinstance(said, Mapping) else said
    if not isinstance(said, Mapping) or not isinstance(method, str) or method not in _READERS:
        raise UnsupportedError(
            f"the checkpoint is quantized (quantization_config: {shorten(method)}), which is not supported in this "
            f"format; accepted: {', '.join(_READERS)}, weights that are not quantized, or a GGUF file"
        )
    return _READERS[method](said)


def _fp8(said: Fields) -> Quantization:
    _require(said, "fmt", "e4m3", None)
    return Quantization("fp8", _block(said, "weight_block_size"))


def _compressed_tensors(said: Fields) -> Quantization:
    _require(said, "format", "float-quantized", None)
    _require(said, "kv_cache_scheme", None)
    groups = said.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ConfigError("quantization_config of compressed-tensors has no config_groups")
    blocks = set()
    for group in groups.values():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            raise ConfigError("a group of quantization_config has no weights")
        _require(weights, "type", "float")
        _require(weights, "num_bits", 8)
        _require(weights, "symmetric", True, None)
        _require(weights, "strategy", "tensor", "channel", "block")
        blocks.add(_block(weights, "block_structure"))
    if len(blocks) > 1:
        raise UnsupportedError("groups of quantization_config with different block_structure are not supported")
    return Quantization("fp8", blocks.pop())


def _awq(said: Fields) -> Quantization:
    _require(said, "bits", 4)
    _require(said, "version", "gemm", "GEMM", None)
    return Quantization("awq", group=_group(said))


def _gptq(said: Fields) -> Quantization:
    _require(said, "bits", 4)
    _require(said, "checkpoint_format", "gptq", "gptq_v2", None)
    return Quantization("gptq", group=_group(said), zero_offset=said.get("checkpoint_format") != "gptq_v2")


_READERS: dict[str, Callable[[Fields], Quantization]] = {
    "fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
    "awq": _awq,
    "gptq": _gptq,
}


def _require(said: Fields, key: str, *accepted: object) -> None:
    if said.get(key) not in accepted:
        shown = ", ".join(str(value) for value in accepted if value is not None or len(accepted) == 1)
        raise UnsupportedError(
            f"{key} {shorten(said.get(key))} of quantization_config is not supported; accepted: {shown}"
        )


def _group(said: Fields) -> int | None:
    return None if said.get("group_size", -1) == -1 else count(said, "group_size")


def _block(said: Fields, key: str) -> tuple[int, int] | None:
    sizes = said.get(key)
    if sizes is None:
        return None
    if not isinstance(sizes, list) or len(sizes) != 2:
        raise ConfigError(f"{key} of quantization_config must be two numbers, not {shorten(sizes)}")
    rows, columns = (count({key: size}, key) for size in sizes)
    return rows, columns
