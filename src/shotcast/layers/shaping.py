"""The parts of a GPU that computation and communication take while both run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from shotcast.layers.linear import products_by


@dataclass(frozen=True, slots=True)
class Shaping:
    """The part of a GPU that sums over ranks may take, and that products leave to them."""

    sms: int | None = None  # the most SMs that a sum takes, without its norm; None for what the fused operation takes
    left_sms: int = 0  # the number of SMs that products of the vendor's library leave alone
    own_products: bool = False  # multiply by our own kernel where it serves, whose blocks leave room on every SM

    @contextlib.contextmanager
    def scope(self, device: torch.device) -> Iterator[None]:
        """Shape the products of this thread until the scope ends."""
        if not self.left_sms and not self.own_products:
            yield
            return
        from shotcast.overlap.products import LibraryProduct, ShapedProduct

        own = ShapedProduct() if self.own_products else None
        with products_by(own), LibraryProduct(self.left_sms).scope(device):
            yield


UNSHAPED = Shaping()
