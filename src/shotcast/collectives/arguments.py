"""Checks of arguments. Errors name the method (``call``), what is wrong and what is accepted."""

from __future__ import annotations

import sys
import warnings

import torch

from shotcast.collectives.torch_private import is_traced
from shotcast.errors import ConfigError, UnsupportedError
from shotcast.wire import MAX_SMS

_PACKAGE = __name__.partition(".")[0] + "."
_told: set[tuple[str, int]] = set()
"""Call sites that have been warned about."""
_INSIDE = "to_local() of a DTensor, wait() of an AsyncCollectiveTensor"


def valid(x: torch.Tensor, name: str, device: torch.device, call: str) -> None:
    """Raise ConfigError unless ``x`` is a contiguous tensor on ``device``."""
    plain = type(x) is torch.Tensor and x.device == device and x.layout is torch.strided and x.is_contiguous()
    if plain and (is_traced() or not (x.is_conj() or x.is_neg())):
        return  # the common case, which must not cost an eager call more checks
    if not isinstance(x, torch.Tensor):
        raise ConfigError(f"{call}: {name} is a torch.Tensor, not {type(x).__name__}")
    if x.device != device:
        raise ConfigError(f"{call}: {name} lies on {x.device}; this communicator serves {device}")
    if x.layout != torch.strided or not x.is_contiguous():
        description = (
            f"shape {list(x.shape)}, strides {list(x.stride())}" if x.layout == torch.strided else str(x.layout)
        )
        method = "contiguous" if x.layout == torch.strided else "to_dense"
        # a copy would get the results, and be lost
        instead = "a contiguous tensor, or none" if name.endswith("out") else f"{name}.{method}()"
        raise ConfigError(f"{call}: {name} is not contiguous ({description}); pass {instead}")
    if is_traced():  # a traced call is checked again when it is made
        return
    if type(x) is not torch.Tensor and type(x).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        # a DTensor, a result of PyTorch's functional collectives and the like have no memory of their own
        kind = type(x).__name__
        raise ConfigError(f"{call}: {name} is a {kind}, not a plain tensor; pass the tensor inside ({_INSIDE})")
    if x.is_conj() or x.is_neg():
        # the memory holds other values than the tensor shows
        raise ConfigError(f"{call}: {name} is conjugated or negated lazily; pass {name}.resolve_conj().resolve_neg()")


def dense(x: torch.Tensor, name: str, device: torch.device, call: str) -> torch.Tensor:
    """Return ``x``, or a contiguous copy of a strided tensor, with a warning once per call site.

    Raises ConfigError for any other reason for which :func:`valid` rejects a tensor.
    """
    plain = type(x) is torch.Tensor and x.device == device and x.layout is torch.strided and x.is_contiguous()
    if plain and (is_traced() or not (x.is_conj() or x.is_neg())):
        return x
    if isinstance(x, torch.Tensor) and x.device == device and x.layout is torch.strided and not x.is_contiguous():
        if not is_traced():
            _warn(f"{name} is not contiguous (strides {list(x.stride())}), so each such call copies it first")
        x = x.contiguous()
    valid(x, name, device, call)
    return x


def _warn(text: str) -> None:
    """Warn once about the line that called this package."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    place = frame.f_code.co_filename, frame.f_lineno
    if place not in _told:  # Python forgets such places whenever filters of warnings change
        _told.add(place)
        warnings.warn(text, UserWarning, stacklevel=level)


def output(
    x: torch.Tensor, out: torch.Tensor | None, shape: tuple[int, ...], call: str, own_at: int | None = None
) -> torch.Tensor:
    """Check ``out`` against ``shape`` and ``x`` and return it; None creates a new tensor.

    Args:
        own_at: for calls that read ``x`` while they write ``out``, the only byte offset in the larger tensor at which
            the smaller may begin; None if a copy to ``out`` follows the call.
    """
    if out is None:
        return x.new_empty(shape)
    valid(out, "out", x.device, call)
    if out.dtype != x.dtype or out.shape != shape:
        raise ConfigError(f"{call}: out must be {list(shape)} of {x.dtype}; it is {list(out.shape)} of {out.dtype}")
    if out.requires_grad:
        writable(out, "out", call)
    if own_at is not None and not is_traced():
        _in_place_or_apart(x, out, call, own_at)
    return out


def _in_place_or_apart(x: torch.Tensor, out: torch.Tensor, call: str, own_at: int) -> None:
    """Raise ConfigError if ``x`` and ``out`` overlap, unless the smaller begins ``own_at`` bytes into the larger."""
    behind, of_x, of_out = out.data_ptr() - x.data_ptr(), x.nbytes, out.nbytes
    if of_x and of_out and -of_out < behind < of_x and (behind if of_x >= of_out else -behind) != own_at:
        accepted = f"the rank's own part, from byte {own_at} on" if of_x != of_out else "all of it"
        raise ConfigError(
            f"{call}: x and out share memory: out begins {behind} bytes behind x. Of the larger, the smaller may be "
            f"{accepted}; give another tensor as out, or none"
        )


def writable(x: torch.Tensor, name: str, call: str) -> None:
    """Raise ConfigError if autograd would record an in-place change of a leaf ``x`` that requires grad, or of its
    view.
    """
    if x.requires_grad and torch.is_grad_enabled():
        what = "a leaf Variable" if x.is_leaf else ""
        if not is_traced() and x._base is not None and x._base.is_leaf:
            what = "a view of a leaf Variable"
        if what:
            raise ConfigError(
                f"{call}: {what} that requires grad is being used in an in-place operation: {name} is written. "
                f"Write it under torch.no_grad(), or pass {name}.detach()"
            )


def without_gradient(call: str, **operands: object) -> None:
    """Raise UnsupportedError if autograd would record a call that is not differentiable."""
    for name, operand in operands.items():
        if isinstance(operand, torch.Tensor) and operand.requires_grad and torch.is_grad_enabled():
            raise UnsupportedError(
                f"{call} has no derivative, and {name} requires grad; make the call under torch.no_grad(), or pass "
                f"{name}.detach()"
            )


def rows_per_rank(x: torch.Tensor, world_size: int, call: str) -> int:
    """Return the first dimension of ``x`` divided by the number of ranks. Raises ConfigError if it is not divisible."""
    if x.dim() == 0 or x.shape[0] % world_size:
        raise ConfigError(
            f"{call}: the first dimension of x is divided among {world_size} ranks; its shape is {list(x.shape)}"
        )
    return x.shape[0] // world_size


def rank_in(rank: int, world_size: int, name: str, call: str) -> int:
    """Return ``rank``. Raises ConfigError unless it is a valid rank."""
    if not isinstance(rank, int) or not 0 <= rank < world_size:
        raise ConfigError(f"{call}: {name} is a rank in 0..{world_size - 1}, not {rank!r}")
    return rank


def sm_budget(sms: int | None, call: str) -> int:
    """Return the maximum number of SMs of a call, 0 for None. Raises ConfigError for an invalid number."""
    if sms is None:
        return 0
    if not isinstance(sms, int) or isinstance(sms, bool) or not 0 <= sms <= MAX_SMS:
        raise ConfigError(f"{call}: sms is a whole number in 0..{MAX_SMS}, or None for any number of SMs; not {sms!r}")
    return sms
