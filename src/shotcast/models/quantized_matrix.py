"""Quantized matrices of Hugging Face checkpoints: FP8 with scales, and the 4-bit formats of AWQ and GPTQ.

    FP8       value = e4m3 * scale            a scale for the matrix, each output, or each block of both dimensions
    4 bits    value = (code - zero) * scale   a scale and a zero for each output and each group of inputs

Several tensors form one matrix [outputs, inputs]. Formats: github.com/vllm-project/compressed-tensors,
github.com/casper-hansen/AutoAWQ (version "gemm"), github.com/AutoGPTQ/AutoGPTQ ("gptq", whose zeros are stored minus
one, and "gptq_v2").
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shotcast.errors import ConfigError
from shotcast.layers.quantized import LEAST_GROUP, PER_WORD, Float8Rows, GroupedRows, common_group, pack
from shotcast.models.quantization_config import Quantization

_AWQ_ORDER, _IN_ORDER = (0, 4, 1, 5, 2, 6, 3, 7), tuple(range(PER_WORD))
"""The position in a word of each of eight neighbors."""
FLOAT8 = "F8_E4M3"
"""The dtype's name in safetensors files."""


@dataclass(frozen=True, slots=True)
class Float8Matrix:
    """An FP8 matrix."""

    values: Any  # e4m3 [outputs, inputs], in the file
    scale: torch.Tensor  # float32, one for each block
    block: tuple[int, int]  # the rows and columns of a block
    shape: tuple[int, int]  # outputs and inputs

    def read(self, rows: slice, columns: slice) -> torch.Tensor:
        """Read a part, given by its bounds, as float32 values."""
        row, column = (
            torch.arange(part.start, part.stop, device="cpu") // size
            for part, size in zip((rows, columns), self.block, strict=True)
        )
        return self.values[rows, columns].float() * self.scale[row][:, column]

    def stored(self, rows: slice, columns: slice) -> Float8Rows | GroupedRows | None:
        """Return a part in a format that layers can multiply with; None if there is none."""
        values = self.values[rows, columns].contiguous()
        scale = self.scale[torch.arange(rows.start, rows.stop, device="cpu") // self.block[0]]
        if self.scale.shape[1] == 1:
            return Float8Rows(values, scale)
        if (group := common_group(self.block[1], columns)) < LEAST_GROUP:
            return None
        column = torch.arange(columns.start, columns.stop, group, device="cpu") // self.block[1]
        return GroupedRows(values, scale[:, column].t().contiguous(), None, group)


@dataclass(frozen=True, slots=True)
class Int4Matrix:
    """A matrix of 4-bit codes. All tensors except the last are stored in the file."""

    codes: Any  # int32 [inputs / 8, outputs], or with ``packs_outputs`` [inputs, outputs / 8]
    zeros: Any  # int32 [groups, outputs / 8]
    scales: Any  # [groups, outputs]
    packs_outputs: bool  # a word has the codes of eight outputs, rather than inputs
    order: tuple[int, ...]  # the place in its word of each of eight outputs
    zero_offset: int  # what is to be added to the stored zeros
    group: int  # the number of inputs of a group
    group_of: torch.Tensor  # the group of each input, which may be in any order
    shape: tuple[int, int]

    def read(self, rows: slice, columns: slice) -> torch.Tensor:
        groups, group_of = self.group_of[columns].unique(return_inverse=True)
        if not groups.numel() or rows.start == rows.stop:
            return torch.empty(rows.stop - rows.start, columns.stop - columns.start, device="cpu")
        of_file = slice(int(groups[0]), int(groups[-1]) + 1)
        codes = self._codes(rows, columns)
        wanted = groups - of_file.start
        zeros = self._unpacked(self.zeros, of_file, rows)[wanted] + self.zero_offset
        scales = self.scales[of_file, rows].float()[wanted]
        return ((codes - zeros[group_of]) * scales[group_of]).t().contiguous()

    def stored(self, rows: slice, columns: slice) -> GroupedRows | None:
        inputs = torch.arange(self.shape[1], device="cpu")
        group = common_group(self.group, columns)
        if group < LEAST_GROUP or not torch.equal(self.group_of, inputs // self.group):
            return None
        groups = torch.arange(columns.start, columns.stop, group, device="cpu") // self.group
        of_file = slice(int(groups[0]), int(groups[-1]) + 1)
        zeros = self._unpacked(self.zeros, of_file, rows)[groups - of_file.start] + self.zero_offset
        scales = self.scales[of_file, rows][groups - of_file.start]
        return GroupedRows(pack(self._codes(rows, columns).t()), scales, zeros.to(torch.uint8), group)

    def _codes(self, rows: slice, columns: slice) -> torch.Tensor:
        """Return the codes of a part, [columns, rows]."""
        if self.packs_outputs:
            return self._unpacked(self.codes, columns, rows)
        words = self.codes[_words(columns), rows]
        return _nibbles(words.t(), _IN_ORDER)[:, _within_words(columns)].t()

    def _unpacked(self, words: Any, first: slice, outputs: slice) -> torch.Tensor:
        """Unpack words of eight outputs each into codes [first, outputs]."""
        return _nibbles(words[first, _words(outputs)], self.order)[:, _within_words(outputs)]


def _words(part: slice) -> slice:
    """Return the words that contain a part."""
    return slice(part.start // PER_WORD, -(-part.stop // PER_WORD))


def _within_words(part: slice) -> slice:
    first = part.start // PER_WORD * PER_WORD
    return slice(part.start - first, part.stop - first)


def _nibbles(words: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """Return the eight codes of each word, in this order: [rows, words] to [rows, 8 * words]."""
    shifts = 4 * torch.tensor(order, dtype=torch.int32, device="cpu")
    return ((words[:, :, None] >> shifts) & 15).flatten(1)


QuantizedMatrix = Float8Matrix | Int4Matrix


def quantized_matrices(
    quantization: Quantization, slices: Mapping[str, Any], read: Callable[[str], torch.Tensor]
) -> tuple[dict[str, QuantizedMatrix], set[str]]:
    """Find the quantized matrices among a checkpoint's tensors. Returns the matrices by weight name, and the names of
    all tensors they consist of. Raises ConfigError if a tensor is missing, or if shapes do not match.

    Args:
        slices: the tensors by name, readable in parts.
    """
    last, make = (".weight", _float8) if quantization.method == "fp8" else (".qweight", _int4)
    found: dict[str, QuantizedMatrix] = {}
    used: set[str] = set()
    for name in slices:
        if not name.endswith(last) or (quantization.method == "fp8" and slices[name].get_dtype() != FLOAT8):
            continue
        stem = name.removesuffix(last)
        parts = _Parts(stem, slices, read)
        found[f"{stem}.weight"] = make(quantization, parts)
        used |= parts.used
    return found, used


def _float8(quantization: Quantization, parts: _Parts) -> Float8Matrix:
    values = parts.slice("weight")
    outputs, inputs = values.get_shape()
    name = next((name for name in ("weight_scale", "weight_scale_inv") if parts.has(name)), "weight_scale")
    scale = parts.whole(name).float()
    if parts.has("input_scale"):  # of activations, whose scales are found anew for each row
        parts.slice("input_scale")
    block = quantization.block or ((1, inputs) if scale.numel() == outputs and outputs > 1 else (outputs, inputs))
    blocks = -(-outputs // block[0]), -(-inputs // block[1])
    if scale.numel() != blocks[0] * blocks[1] or (quantization.block is not None and tuple(scale.shape) != blocks):
        raise ConfigError(
            f"{parts.stem}.{name} is {list(scale.shape)}, which are no scales of {[outputs, inputs]}"
            + (f" in blocks of {list(quantization.block)}" if quantization.block else "")
        )
    return Float8Matrix(values, scale.reshape(blocks), block, (outputs, inputs))


def _int4(quantization: Quantization, parts: _Parts) -> Int4Matrix:
    codes, zeros, scales = (parts.slice(name) for name in ("qweight", "qzeros", "scales"))
    packs_outputs = quantization.method == "awq"
    first, second = codes.get_shape()
    outputs, inputs = (PER_WORD * second, first) if packs_outputs else (second, PER_WORD * first)
    group = quantization.group or inputs
    group_of = parts.whole("g_idx").long() if parts.has("g_idx") else torch.arange(inputs, device="cpu") // group
    groups = -(-inputs // group)
    shapes = [tuple(part.get_shape()) for part in (zeros, scales)] + [tuple(group_of.shape)]
    if shapes != [(groups, outputs // PER_WORD), (groups, outputs), (inputs,)] or outputs % PER_WORD:
        raise ConfigError(
            f"{parts.stem} is {[outputs, inputs]} in groups of {group}, which qzeros, scales and g_idx of "
            f"{', '.join(str(list(shape)) for shape in shapes)} do not fit"
        )
    if not 0 <= int(group_of.min()) <= int(group_of.max()) < groups:
        raise ConfigError(f"{parts.stem}.g_idx has groups beyond the {groups} that have scales")
    order = _AWQ_ORDER if packs_outputs else _IN_ORDER
    return Int4Matrix(
        codes, zeros, scales, packs_outputs, order, quantization.zero_offset, group, group_of, (outputs, inputs)
    )


class _Parts:
    """The tensors of one matrix, and the names that have been requested."""

    def __init__(self, stem: str, slices: Mapping[str, Any], read: Callable[[str], torch.Tensor]):
        self.stem, self._slices, self._read = stem, slices, read
        self.used: set[str] = set()

    def has(self, name: str) -> bool:
        return f"{self.stem}.{name}" in self._slices

    def slice(self, name: str) -> Any:
        """Return a tensor that can be read in parts. Raises ConfigError if there is none."""
        if not self.has(name):
            raise ConfigError(f"the checkpoint has no {self.stem}.{name}, without which {self.stem} cannot be read")
        self.used.add(f"{self.stem}.{name}")
        return self._slices[f"{self.stem}.{name}"]

    def whole(self, name: str) -> torch.Tensor:
        """Read a tensor. Raises ConfigError if there is none."""
        self.slice(name)
        return self._read(f"{self.stem}.{name}")
