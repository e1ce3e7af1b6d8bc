"""Prepared calls: repeat a call like an earlier one without deciding again how to make it.

In a small call, the host spends most of its time on checking tensors and on selecting the algorithm and kernel. The
same arguments and tensors of the same kind give the same answers. PyTorch compares the tensors in one step, as for the
inputs of compiled code; only their addresses and the state of the communicator remain to be checked.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from operator import itemgetter
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, is_grad_enabled  # names of this module: looked up in one step
from torch._C._dynamo.guards import TensorGuards  # a private name of PyTorch
from torch.compiler import is_dynamo_compiling

from shotcast.collectives.choice.resolver import ResolvedCall
from shotcast.collectives.interface import Executor
from shotcast.collectives.norm_operands import ALIGN, Fp8Normed
from shotcast.collectives.reductions import divide
from shotcast.collectives.stream_order import StreamChain
from shotcast.collectives.torch_private import Unseen, increment_version, is_traced
from shotcast.collectives.vendor.vendor import Vendor
from shotcast.memory.operands import NormTensors

T = TypeVar("T")
KEPT_CALLS = 4096
"""The maximum number of cached calls."""
Operands = tuple[Tensor | None, ...]
"""The tensors that a method is given: x and out or, for a fused call, x, residual, weight, bias, scale, normed,
new_residual, quantized and the row scales. None stands for a missing one."""
Given = tuple[tuple[Any, ...], Operands]
"""The arguments of a method: non-tensors, and the operands."""

_ALIASES = {2: ((0, 1),), 9: ((0, 5), (1, 6))}
"""Operands that may be the same object, by the number of operands: x and out; x and normed, residual and new_residual.

The lookup key of a call says whether they are.
"""
_ALIGNED = frozenset({0, 1, 2, 3, 5, 6, 7})
"""The operands of a fused call that kernels need aligned to 16 bytes."""
_MOST_REMEMBERED = 256
"""The maximum number of cached address sets per call whose operands are known not to overlap."""

_MOST_PATTERNS = 256
"""The maximum number of argument patterns whose latest call is found without its shape."""

_address: Callable[[Tensor], int] = Tensor.data_ptr
_new: Callable[..., Any] = tuple.__new__


class KeptCalls(dict[Any, T], Generic[T]):
    """Calls by their arguments, resolved or prepared. A lookup leaves no trace, since that would cost every call.

    Half of them are young. When that half overflows, the young ones become old, and the old ones are evicted. An old
    call that is made becomes young again, so a call that recurs at least once per 2,048 new ones is never evicted.
    """

    __slots__ = ("_old",)

    def __init__(self) -> None:
        super().__init__()
        self._old: dict[Any, T] = {}

    def recall(self, key: Any) -> T | None:
        """Return an old call and make it young; None if there is none."""
        call = self._old.pop(key, None)
        return None if call is None else self.keep(key, call)

    def keep(self, key: Any, call: T) -> T:
        """Store a call, and return it."""
        if len(self) >= KEPT_CALLS // 2:
            self._old = dict(self)
            super().clear()
        self[key] = call
        return call

    def clear(self) -> None:
        super().clear()
        self._old.clear()


class PreparedCall:
    """A call that has been made, ready to repeat on operands of the same kind.

    Args:
        outputs: the tensors that it wrote; None for the ones among the last operands that it did not.
        reads: whether it reads the first operand.
        sizes: the sizes of the parts that two ranks know.
        divisor: the result is divided by this number; 0 for none.
    """

    __slots__ = (
        "_aligned", "_bound", "_divisor", "_eps", "_fp8", "_leaves", "_made", "_may_match", "_pairs", "_pick", "_reads",
        "_seen", "_shared", "_sizes", "_written",
    )  # fmt: skip

    def __init__(
        self,
        shared: PreparedCalls,
        call: ResolvedCall,
        operands: Operands,
        outputs: Operands,
        reads: bool,
        norm: NormTensors | None,
        sizes: tuple[int, ...],
        divisor: int,
    ):
        assert call.bound is not None
        self._shared, self._bound, self._reads, self._sizes, self._divisor = shared, call.bound, reads, sizes, divisor
        self._eps = None if norm is None else norm.eps
        self._fp8 = norm is not None and norm.quantized is not None
        first = len(operands) - len(outputs)
        given = [at for at, one in enumerate(operands) if one is not None and _first(operands, one) == at]
        distinct = [one for at in given if (one := operands[at]) is not None]
        self._pick = _getter(given)
        self._may_match = TensorGuards(*distinct, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        self._leaves = any(one.requires_grad for one in distinct)
        self._made: tuple[tuple[torch.Size, torch.dtype] | None, ...] | None = None
        if not any(one is not None for one in operands[first:]) and any(one is not None for one in outputs):
            self._made = tuple(None if one is None else (one.shape, one.dtype) for one in outputs)
        changed = [] if self._made else [at for at, one in enumerate(outputs, first) if one is not None]
        self._written = _getter(changed)
        written = {given.index(_first(operands, operands[at])) for at in changed}
        self._pairs = tuple(
            (one, other, distinct[other].nbytes, distinct[one].nbytes, _offset(distinct[one], distinct[other]))
            for one in sorted(written)
            for other in range(len(distinct))
            if other > one or other not in written
        )
        self._aligned = [place for place, at in enumerate(given) if norm and shared.aligns_norms and at in _ALIGNED]
        self._seen: set[tuple[int, ...]] = set()

    def matches(self, operands: Operands) -> bool:
        """Return whether the call may run on these operands, which must be like the original ones."""
        distinct = self._pick(operands)
        if not self._may_match(*distinct) or (self._leaves and is_grad_enabled()):
            return False
        if self._pairs or self._aligned:
            addresses = tuple(map(_address, distinct))
            if addresses not in self._seen:
                for one, other, before, behind, accepted in self._pairs:
                    offset = addresses[other] - addresses[one]
                    if -before < offset < behind and offset != accepted and before and behind:
                        return False
                for place in self._aligned:
                    if addresses[place] % ALIGN:
                        return False
                if len(self._seen) >= _MOST_REMEMBERED:
                    self._seen.clear()
                self._seen.add(addresses)
        return True

    def run(self, operands: Operands) -> Any:
        """Run the call on matching operands. Returns its result: the written tensors, or True if there are none.

        Returns None and does nothing if the communicator is closed, stopped or in a call of another thread, or if the
        call would be captured in a graph. Raises the named error of a call that fails.
        """
        shared = self._shared
        if not shared.lock.acquire(False):
            return None
        try:
            chain = shared.chain
            if not shared.is_open or shared.stopped_word.value or shared.vendor.failed:
                return None
            if chain is not None and chain.enter():
                return None
            x, out, norm = operands[0], operands[-1], None
            outputs: list[Any] = []
            if self._made is not None:
                assert x is not None
                for kind in self._made:
                    outputs.append(None if kind is None else x.new_empty(kind[0], dtype=kind[1]))
                out = outputs[0]
            result: Any = out
            if self._eps is None:
                if out is None:
                    result = True
                elif shared.counts_versions:
                    increment_version((out,))
            else:
                _, residual, weight, bias, scale, normed, new_residual, quantized, rows = operands
                if self._made is not None:
                    normed, new_residual, quantized, rows = outputs
                else:
                    increment_version(self._written(operands))
                scale, out = rows if scale is None else scale, None
                norm = _new(NormTensors, (residual, weight, self._eps, new_residual, normed, quantized, scale, bias))
                result = normed, new_residual
                if self._fp8:
                    result = _new(Fp8Normed, (quantized, scale, new_residual, normed))
            self._bound.run(x if self._reads else None, out, norm, self._sizes)
            if chain is None and shared.stopped_word.value:
                check = shared.check()
                assert check is not None
                check()
            if self._divisor:
                with Unseen():
                    divide(result, self._divisor)
            if chain is not None:
                chain.leave(False)
        finally:
            shared.lock.release()
        return result


class PreparedCalls:
    """The prepared calls of one communicator, and what they need from it.

    ``executor`` is None if no call can be prepared.

    Args:
        chain: the stream chain for calls on a GPU; None for calls that block.
        lock: held during a call.
        check: returns a function that raises the fault that stopped blocking calls. It does not keep the communicator
            alive.
        aligns_norms: fused calls copy operands that do not begin at a multiple of 16 bytes; prepared ones do not.

    Attributes:
        is_open: prepared calls may run now.
        counts_versions: calls increment autograd's version counters of the tensors that they write.
    """

    def __init__(
        self,
        executor: Executor | None,
        vendor: Vendor,
        chain: StreamChain | None,
        lock: threading.Lock,
        check: Callable[[], Callable[[], None] | None],
        aligns_norms: bool,
    ):
        self._calls: KeptCalls[PreparedCall] = KeptCalls()
        self._latest: dict[tuple[Any, ...], PreparedCall] = {}  # by what a call is found by beside shape and dtype
        self._executor, self._closed = executor, False
        self.stopped_word: Any = None if executor is None else executor.stopped_word
        self.vendor, self.chain, self.lock, self.check, self.aligns_norms = vendor, chain, lock, check, aligns_norms
        self.is_open = self.counts_versions = True

    def find(self, key: tuple[Any, ...], operands: Operands) -> PreparedCall | None:
        """Look up the call made with these arguments, if it matches the operands."""
        x, last = operands[0], operands[-1]
        if is_dynamo_compiling() or (type(x) is not Tensor and (x is not None or is_traced())):
            return None
        pattern = key, last is x, last is None
        try:
            call = self._latest.get(pattern)
        except TypeError:  # an argument of a wrong type has no hash; the checks of a new call say what is wrong with it
            return None
        if call is not None and (x is None or call.matches(operands)):
            return call
        kind = pattern if x is None else (*pattern, x.shape, x.dtype)
        call = self._calls.get(kind) or self._calls.recall(kind)
        if call is None or (x is not None and not call.matches(operands)):
            return None
        if len(self._latest) >= _MOST_PATTERNS:
            self._latest.clear()
        self._latest[pattern] = call
        return call

    def keep(
        self,
        given: Given,
        call: ResolvedCall,
        x: Tensor | None,
        out: Tensor | None,
        norm: NormTensors | None,
        sizes: tuple[int, ...],
        divisor: int,
    ) -> None:
        """Prepare a call just made on ``x`` and ``out``, which may be the caller's tensors, copies or new ones.

        Calls that use the vendor library or copies cannot be prepared.
        """
        key, operands = given
        first, last = operands[0], operands[-1]
        if self._executor is None or call.bound is None or call.by_library or call.is_makeshift:
            return
        if (x is not None and x is not first) or (first is not None and type(first) is not Tensor):
            return
        outputs: Operands = (out,)
        if norm is not None:
            rows = norm.scale if norm.quantized is not None and operands[4] is None else None
            outputs = norm.normed, norm.new_residual, norm.quantized, rows
        elif out is not None and last is not None and last is not out:
            return
        same = {(_first(operands, one), at) for at, one in enumerate(operands) if one is not None}
        if any(one != at and (one, at) not in _ALIASES[len(operands)] for one, at in same):
            return
        prepared = PreparedCall(self, call, operands, outputs, x is not None, norm, sizes, divisor)
        kind: tuple[Any, ...] = key, last is first, last is None
        if first is not None:
            kind = (*kind, first.shape, first.dtype)
        self._calls.keep(kind, prepared)
        if len(self._calls) == 1:  # the others are old, and are to be looked up to be young again
            self._latest.clear()

    def clear(self) -> None:
        """Forget all calls, since the workspace addresses have changed."""
        self._calls.clear()
        self._latest.clear()

    def pause(self) -> None:
        """Suspend prepared calls for a while: each call must first wait for asynchronous ones."""
        self.is_open = False

    def resume(self) -> None:
        self.is_open = not self._closed

    def close(self) -> None:
        """Disable prepared calls. The caller holds the lock."""
        self._closed, self.is_open = True, False
        self.clear()


def _first(operands: Operands, one: Tensor | None) -> int:
    return next(at for at, other in enumerate(operands) if other is one)


def _getter(places: list[int]) -> Callable[[Operands], tuple[Any, ...]]:
    """Return a getter that picks the operands at these positions as a tuple, in one step."""
    if len(places) > 1:
        return itemgetter(*places)
    return itemgetter(slice(places[0], places[0] + 1) if places else slice(0))


def _offset(one: Tensor, other: Tensor) -> int:
    return other.data_ptr() - one.data_ptr()
