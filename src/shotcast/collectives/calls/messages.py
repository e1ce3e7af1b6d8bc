"""Messages between two ranks: send, recv and batches of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shotcast.collectives import ops
from shotcast.collectives.arguments import dense, rank_in, valid, writable
from shotcast.collectives.calls.caller import Caller
from shotcast.collectives.torch_ops import autograd
from shotcast.collectives.torch_private import is_traced
from shotcast.errors import ConfigError
from shotcast.wire import Op


class MessageCalls(Caller):
    """Calls between two ranks, which do not involve the others."""

    def send(self, x: torch.Tensor, dst: int) -> None:
        """Send ``x`` to rank ``dst``, which must receive as many elements of the same dtype.

        The send completes (on CUDA: on the current stream) when the end of the message is in a mailbox, which holds as
        many messages as :meth:`waiting_messages` says. So a sender may learn only in a later call that nobody received,
        or that the receiver expected something else. Gradients are not sent back automatically: the receiver sends
        them.
        """
        given = ("send", dst, type(dst)), (x, None)
        if (prepared := self._prepared.find(*given)) and prepared.run(given[1]):
            return
        x = dense(x, "x", self.device, "send")
        if rank_in(dst, self.world_size, "dst", "send") == self.rank:
            raise ConfigError(f"send: rank {self.rank} cannot send to itself")
        if is_traced():
            self._traced(Op.SEND, x, dst)
            return
        self._run(Op.SEND, x, None, root=dst, given=given)

    def waiting_messages(self, x: torch.Tensor) -> int:
        """Return the number of messages like ``x`` that a sender may be ahead of its receiver.

        It is 0 if the vendor library carries them, which makes no guarantee. This call does not communicate.
        """
        if self._executor is None or self.explain(x, "send").by_library:
            return 0
        return self._executor.waiting(x.numel() * x.element_size())

    def recv(self, x: torch.Tensor, src: int) -> torch.Tensor:
        """Receive into ``x`` the tensor that rank ``src`` sends; autograd treats it as a constant. Returns ``x``."""
        key, operands = ("recv", src, type(src)), (x, x)
        if (prepared := self._prepared.find(key, operands)) and (done := prepared.run(operands)) is not None:
            return done
        valid(x, "x", self.device, "recv")
        if rank_in(src, self.world_size, "src", "recv") == self.rank:
            raise ConfigError(f"recv: rank {self.rank} cannot receive from itself")
        if is_traced():
            return self._traced(Op.RECV, x, src)
        if x.requires_grad and torch.is_grad_enabled():
            writable(x, "x", "recv")
            return x.copy_(self.recv(torch.empty_like(x, requires_grad=False), src))
        self._run(Op.RECV, None, x, root=src, given=(key, operands))
        return x

    def batch_send_recv(
        self, sends: Sequence[tuple[torch.Tensor, int]] = (), recvs: Sequence[tuple[torch.Tensor, int]] = ()
    ) -> list[torch.Tensor]:
        """Send and receive several messages at once, so that no order of them can deadlock.

        Between two ranks, messages in one direction keep their order. The messages are separate calls in an order that
        all ranks share; ranks that exchange messages both ways must batch all of them.

        Args:
            sends: (tensor, destination rank).
            recvs: (tensor, source rank); constants for autograd.

        Returns:
            The tensors of ``recvs``, filled.
        """
        size, device, name = self.world_size, self.device, "batch_send_recv"
        for each in (*sends, *recvs):
            if not (isinstance(each, tuple) and len(each) == 2):
                raise ConfigError(f"{name}: each message is (tensor, rank), not {type(each).__name__}")
        messages = [(Op.SEND, dense(x, "x", device, name), rank_in(dst, size, "dst", name)) for x, dst in sends]
        for x, src in recvs:
            valid(x, "x", device, name)
            writable(x, "x", name)
            messages.append((Op.RECV, x, rank_in(src, size, "src", name)))
        if any(peer == self.rank for _, _, peer in messages):
            raise ConfigError(f"{name}: rank {self.rank} exchanges no messages with itself; copy the tensor")
        if is_traced():
            for op, x, peer in self._in_common_order(messages):
                self._traced(op, x, peer)
        elif torch.is_grad_enabled() and any(x.requires_grad for x, _ in recvs):
            into = [(torch.empty_like(x, requires_grad=False), src) for x, src in recvs]
            for (x, _), received in zip(recvs, self.batch_send_recv(sends, into), strict=True):
                x.copy_(received)  # so that autograd forgets what x was computed from
        elif messages:
            with torch.no_grad():
                for op, x, peer in self._in_common_order(messages):
                    self._run(op, x if op is Op.SEND else None, None if op is Op.SEND else x, root=peer)
        return [x for x, _ in recvs]

    def _traced(self, op: Op, x: torch.Tensor, peer: int) -> torch.Tensor:
        """Trace a message as an operator of a graph."""
        if op is Op.SEND:
            autograd.in_graph(ops.SEND, self.name, {"x": x.detach(), "dst": peer})
            return x
        writable(x, "x", op.label)
        return x.copy_(autograd.in_graph(ops.RECV, self.name, {"x": x.detach(), "src": peer}))

    def _in_common_order(self, messages: Sequence[tuple[Op, torch.Tensor, int]]) -> list[tuple[Op, torch.Tensor, int]]:
        """Sort messages into an order that both ends of each message share, which makes it deadlock-free.

        First come the first messages between each sender and receiver, then the second ones, and so on, each in
        ascending order of ranks.
        """
        counts: dict[tuple[int, int], int] = {}
        keys = []
        for number, (op, _, peer) in enumerate(messages):
            key = op.value, peer  # Dynamo of PyTorch 2.11 hashes no enumeration
            place = counts[key] = counts.get(key, -1) + 1
            upward = (self.rank < peer) == (op is Op.SEND)
            keys.append((place, min(self.rank, peer), max(self.rank, peer), upward, number))
        return [messages[key[-1]] for key in sorted(keys)]
