"""The division of a GPU between concurrent computation and communication."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from shotcast.layers.linear import products_by


@dataclass(frozen=True, slots=True)
class Shaping:
    """The part of a GPU that sums over ranks may take, and the implementation of concurrent products."""

    # the most SMs that a sum takes, without its norm, and 0 for copy engines; None for what the fused operation takes
    sms: int | None = None
    own_products: bool = False  # multiply by our kernel where it serves, whose blocks leave room on every SM

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Shape the products of this thread until the scope ends."""
        if not self.own_products:
            yield
            return
        from shotcast.overlap.products import ShapedProduct

        with products_by(ShapedProduct()):
            yield


UNSHAPED = Shaping()
