"""Operands of the fused operations: checked, allocated unless the caller passes them, and aligned for kernels."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from shotcast import wire
from shotcast.collectives.arguments import valid, without_gradient, writable
from shotcast.collectives.torch_private import increment_version, is_traced
from shotcast.errors import ConfigError, UnsupportedError
from shotcast.memory.operands import NormTensors
from shotcast.wire import Norm

_SUMMED = tuple(getattr(torch, name) for name in wire.REDUCIBLE)
ALIGN = 16
"""Required alignment of kernel operands, in bytes."""


class Fp8Normed(NamedTuple):
    """A normalized tensor in FP8: about ``quantized * scale``.

    Attributes:
        quantized: float8_e4m3fn, shaped like the normalized tensor.
        scale: float32; the caller's value, or [..., 1], one per row.
        new_residual: sum + residual, in the dtype of the call.
        normed: the tensor before quantization, in the dtype of the call; None unless requested.
    """

    quantized: torch.Tensor
    scale: torch.Tensor
    new_residual: torch.Tensor
    normed: torch.Tensor | None


MEMBERS = {False: ("normed", "new_residual"), True: Fp8Normed._fields}
"""The results of a call, by whether its norm is in FP8."""


def norm_operands(
    name: str,
    device: torch.device,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: tuple[torch.Tensor | None, ...] | None,
    kind: str = wire.RMS,
    bias: torch.Tensor | None = None,
    fp8: bool = False,
    scale: torch.Tensor | None = None,
    with_normed: bool = True,
) -> tuple[Norm, NormTensors]:
    """Return the tensors that a call reads and writes.

    ``kind`` is the norm without a bias. With ``fp8`` the norm is quantized by ``scale``, or by scales per row that the
    call computes. Raises ConfigError or UnsupportedError, saying what is wrong and what is accepted.
    """
    check_rows(name, device, x, residual, weight, eps, bias)
    if scale is not None:
        valid(scale, "scale", device, name)
        if scale.dtype != torch.float32 or scale.numel() != 1:
            raise ConfigError(
                f"{name}: scale is one float32, or None for one a row; it is {list(scale.shape)} of {scale.dtype}"
            )
    quantize = ("dynamic" if scale is None else "static") if fp8 else ""
    results = norm_results(x, quantize, with_normed)
    if out is None:
        made = {member: x.new_empty(shape, dtype=dtype) for member, (shape, dtype) in results.items()}
    else:
        given = norm_members(name, out, fp8)
        made = {member: _written(name, member, given[member], *results[member], device) for member in results}
    tensors = NormTensors(
        *(residual, weight, float(eps), made["new_residual"], made.get("normed"), made.get("quantized")),
        *(made.get("scale", scale), bias),
    )
    if out is not None:
        _apart(name, x, tensors, quantize == "dynamic")
    if fp8:
        without_gradient(name, x=x, residual=residual, weight=weight, bias=bias, scale=tensors.scale)
    if out is not None:
        if fp8:
            without_gradient(name, new_residual=tensors.new_residual, normed=tensors.normed)
        increment_version(tuple(made.values()))
    kind = kind if bias is None else wire.LAYER_WITH_BIAS
    return _norm(x.shape[-1], quantize, with_normed, _weight_dtype(x, weight), kind), tensors


def in_place_norm(
    residual: torch.Tensor, weight: torch.Tensor, eps: float, x: torch.Tensor
) -> tuple[Norm, NormTensors]:
    """Return the operands of an RMSNorm that overwrites the residual and ``x``, which are known to fit."""
    norm = _norm(x.shape[-1], "", True, _weight_dtype(x, weight), wire.RMS)
    return norm, NormTensors(residual, weight, float(eps), residual, x)


def norm_results(x: torch.Tensor, quantize: str, with_normed: bool) -> dict[str, tuple[Sequence[int], torch.dtype]]:
    """Return shape and dtype of a call's results."""
    found = {
        "normed": (x.shape, x.dtype) if with_normed else None,
        "new_residual": (x.shape, x.dtype),
        "quantized": (x.shape, torch.float8_e4m3fn),
        "scale": ((*x.shape[:-1], 1), torch.float32) if quantize == "dynamic" else None,
    }
    return {member: kind for member in MEMBERS[bool(quantize)] if (kind := found[member]) is not None}


def norm_members(name: str, out: Any, fp8: bool) -> dict[str, torch.Tensor | None]:
    """Return the tensors of ``out`` by name. Raises ConfigError unless it is a tuple of the right length."""
    members = MEMBERS[fp8]
    if not isinstance(out, tuple) or len(out) != len(members):
        given = out if out is None else type(out).__name__
        raise ConfigError(f"{name}: out is ({', '.join(members)}), not {given}")
    return dict(zip(members, out, strict=True))


def check_rows(
    name: str,
    device: torch.device,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    bias: torch.Tensor | None = None,
) -> None:
    """Raise ConfigError or UnsupportedError for inputs that a call does not take."""
    valid(x, "x", device, name)
    valid(residual, "residual", device, name)
    valid(weight, "weight", device, name)
    if x.dtype not in _SUMMED or residual.dtype != x.dtype or weight.dtype not in _SUMMED:
        raise UnsupportedError(
            f"{name} takes x and residual of one dtype of {', '.join(wire.REDUCIBLE)}, and a weight of any of these; "
            f"they are {x.dtype}, {residual.dtype} and {weight.dtype}"
        )
    if x.dim() == 0 or residual.shape != x.shape or weight.shape != x.shape[-1:]:
        raise ConfigError(
            f"{name} takes x and residual [..., hidden] and weight [hidden]; shapes are "
            f"{list(x.shape)}, {list(residual.shape)}, {list(weight.shape)}"
        )
    if bias is not None:
        valid(bias, "bias", device, name)
        if bias.dtype != weight.dtype or bias.shape != weight.shape:
            raise ConfigError(
                f"{name} takes a bias of the weight's dtype and shape, {list(weight.shape)} of {weight.dtype}; it is "
                f"{list(bias.shape)} of {bias.dtype}"
            )
    if not isinstance(eps, int | float) or not 0 <= eps < math.inf:
        raise ConfigError(f"{name}: eps is a number from 0 up, not {eps!r}")


@functools.lru_cache(maxsize=1024)
def _norm(hidden: int, quantize: str, keeps_normed: bool, weight: str, kind: str) -> Norm:
    """Return a cached norm, since creating one takes longer than looking it up."""
    return Norm(hidden, quantize, keeps_normed, weight, kind)


def _weight_dtype(x: torch.Tensor, weight: torch.Tensor) -> str:
    """Return the dtype of the weight in the notation of :class:`Norm`: empty if it matches ``x``."""
    return "" if weight.dtype is x.dtype else str(weight.dtype).removeprefix("torch.")


def _written(
    name: str, member: str, tensor: torch.Tensor | None, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return ``tensor``. Raises ConfigError unless it can hold a result of this shape."""
    text = f"{name}: {member} of out"
    if tensor is None:
        raise ConfigError(f"{text} must be {list(shape)} of {dtype}; it is None")
    valid(tensor, f"{member} of out", device, name)
    if tensor.dtype != dtype or tensor.shape != torch.Size(shape):
        raise ConfigError(f"{text} must be {list(shape)} of {dtype}; it is {list(tensor.shape)} of {tensor.dtype}")
    writable(tensor, f"{member} of out", name)
    return tensor


_apart_before: set[tuple[Any, ...]] = set()
"""Operands, by addresses and sizes, known not to overlap: most calls repeat earlier ones."""
_MOST_REMEMBERED = 4096


def _apart(name: str, x: torch.Tensor, tensors: NormTensors, finds_scale: bool) -> None:
    """Raise ConfigError if a tensor of ``out`` overlaps another operand.

    The new residual may be all of the residual, and the normalized tensor all of ``x``. ``finds_scale`` means that the
    row scales are outputs.
    """
    if is_traced():
        return
    residual, weight, _, new_residual, normed, quantized, scale, bias = tensors
    key = (  # cheap: the sizes of all others follow from these
        *(name, finds_scale, x.numel(), residual.numel(), weight.numel(), x.dtype, weight.dtype),
        *(x.data_ptr(), residual.data_ptr(), weight.data_ptr(), new_residual.data_ptr()),
        *(None if one is None else one.data_ptr() for one in (normed, quantized, scale, bias)),
    )
    if key in _apart_before:
        return
    out = {"normed": normed, "new_residual": new_residual, "quantized": quantized}
    others = {"x": x, "residual": residual, "weight": weight, "bias": bias}
    (out if finds_scale else others)["scale"] = scale
    given = [(member, tensor) for member, tensor in out.items() if tensor is not None]
    for place, (member, tensor) in enumerate(given):
        for other, shared in (*given[place + 1 :], *others.items()):
            if shared is None or not _overlap(tensor, shared):
                continue
            behind, of = tensor.data_ptr() - shared.data_ptr(), f"{other} of out" if other in out else other
            how = f"{member} of out begins {behind} bytes behind {of}, and overlaps it"
            if behind == 0 and tensor.nbytes == shared.nbytes:
                if (member, other) in (("new_residual", "residual"), ("normed", "x")):
                    continue
                how = f"{member} of out and {of} are one tensor"
            accepted = "new_residual may be all of residual, and normed all of x; all others are apart"
            raise ConfigError(f"{name}: {how}; {accepted}")
    if len(_apart_before) >= _MOST_REMEMBERED:
        _apart_before.clear()
    _apart_before.add(key)


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    behind = one.data_ptr() - other.data_ptr()
    return one.nbytes > 0 and other.nbytes > 0 and -one.nbytes < behind < other.nbytes


_ALIGNED = ("residual", "weight", "bias", "new_residual", "normed", "quantized")
"""The tensors that kernels need at a multiple of 16 bytes, beside ``x``."""


def is_aligned(x: torch.Tensor, tensors: NormTensors) -> bool:
    """Return whether every tensor starts at a multiple of 16 bytes, as kernels require."""
    operands = (x, *(getattr(tensors, name) for name in _ALIGNED))
    return not any(one.data_ptr() % ALIGN for one in operands if one is not None)


def aligned(x: torch.Tensor, tensors: NormTensors) -> tuple[torch.Tensor, NormTensors]:
    """Copy the tensors that do not start at a multiple of 16 bytes; :func:`copy_back` copies results back."""
    return _moved(x), tensors._replace(**{name: _moved(getattr(tensors, name)) for name in _ALIGNED})


def _moved(tensor: Any) -> Any:
    return tensor if tensor is None or tensor.data_ptr() % ALIGN == 0 else tensor.clone()


def copy_back(aligned: NormTensors, tensors: NormTensors) -> None:
    """Copy results to the caller's tensors."""
    for name in ("new_residual", "normed", "quantized"):
        source, target = getattr(aligned, name), getattr(tensors, name)
        if source is not target:
            target.copy_(source)
