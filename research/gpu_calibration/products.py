"""Products of a model's layers on a GPU, each alone: the engine's own linear layers in the shapes of published models.

A shape has as many matrices of weights as it takes to exceed every cache, and calls take turns on them, as in a step.
A layer gets its input as the engine gives it: with FP8 weights and more than two rows, the output projection quantizes
its input itself, and others get it in FP8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from gpu_calibration.case import Case, copies_beyond_caches, off_by

from shotcast.cost.inference import FEW_ROWS
from shotcast.layers import quantized
from shotcast.layers.linear import Linear
from shotcast.layers.quantized import Float8Rows
from shotcast.models.memory_estimate import largest_share
from shotcast.models.presets import preset
from shotcast.planner.step import layer_products

MODELS = {
    False: {"8b": (1, 2, 4, 8), "70b": (1, 2, 4, 8), "405b": (4, 8)},
    True: {"8b": (1,), "70b": (1, 2, 4, 8), "405b": (1, 2, 4, 8)},
}
"""Llama 3.1 by whether weights are in FP8, each divided between these numbers of ranks."""
SUSTAINED = {False: {"8b": (1,), "70b": (1, 2, 4)}, True: {"70b": (1,), "405b": (1, 2, 4)}}
"""Those that are also measured in a row."""
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
HEAD_ROWS = (1, 4, 16, 64, 128, 256, 512)
SUSTAINED_ROWS = (512, 1024, 2048)
GATED, OUTPUT, HEAD = "gate_up", "output", "head"
_CHECKED = 128
"""Outputs that are compared with a product in float32."""
_DEVIATION = 0.02


class ProductShape(NamedTuple):
    """A matrix of weights, and the numbers of rows that are multiplied with it.

    Attributes:
        name: where a model has it, such as "70b/4 qkv".
        outputs, inputs: the sides of the matrix.
        fp8: whether the weights are in FP8.
        rows: of x.
    """

    name: str
    outputs: int
    inputs: int
    fp8: bool
    rows: tuple[int, ...]

    def cases(self, device: torch.device, filled: bool) -> Iterator[Case]:
        """Yield the product for each number of rows; unless ``filled``, with weights that hold anything."""
        weight = self._weight(device, filled)
        copies = copies_beyond_caches(self.outputs * self.inputs * (1 if self.fp8 else 2)) if filled else 1
        layers = [Linear(weight), *(Linear(_clone(weight)) for _ in range(copies - 1))]
        for rows in self.rows:
            x = self._input(layers[0], rows)
            call = self._call(layers, x)
            yield Case(
                {
                    "kernel": "product",
                    "name": self.name,
                    "rows": rows,
                    "outputs": self.outputs,
                    "inputs": self.inputs,
                    "fp8": self.fp8,
                },
                len(layers),
                call,
                lambda call=call, x=x: self._check(weight, x, call(0)),  # type: ignore[misc]
            )

    @property
    def _part(self) -> str:
        return self.name.partition(" ")[2]

    def _weight(self, device: torch.device, filled: bool) -> torch.Tensor | Float8Rows:
        shape = self.outputs, self.inputs
        if filled:
            weight = torch.randn(shape, device=device, dtype=torch.bfloat16).mul_(_DEVIATION)
            return quantized.quantize(weight) if self.fp8 else weight
        if self.fp8:
            scale = torch.empty(self.outputs, 1, device=device)
            return Float8Rows(torch.empty(shape, device=device, dtype=torch.float8_e4m3fn), scale)
        return torch.empty(shape, device=device, dtype=torch.bfloat16)

    def _input(self, layer: Linear, rows: int) -> torch.Tensor | Float8Rows:
        x = torch.randn(rows, self.inputs, device=layer.weight.device, dtype=torch.bfloat16)
        if layer.takes_float8(rows) and self._part != OUTPUT:
            return quantized.quantize(x)
        return x

    def _gated(self, rows: int) -> bool:
        """Return whether a kernel of the engine computes the activation with the product."""
        return self._part == GATED and rows <= FEW_ROWS

    def _call(self, layers: list[Linear], x: torch.Tensor | Float8Rows) -> Callable[[int], Any]:
        if self._gated((x.values if isinstance(x, Float8Rows) else x).shape[0]):
            return lambda turn: layers[turn].gated(x)
        return lambda turn: layers[turn](x)

    def _check(self, weight: torch.Tensor | Float8Rows, x: torch.Tensor | Float8Rows, found: Any) -> None:
        """Raise ArithmeticError if some outputs differ from products in float32 by more than rounding."""
        rounded = self.fp8 and not isinstance(x, Float8Rows)  # by the layer, but with one row or two
        wide_x = _wide(x)
        width = self.outputs // 2 if self._gated(wide_x.shape[0]) else self.outputs
        some = torch.randperm(width, device=wide_x.device)[:_CHECKED]

        def product(outputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            some_rows = Float8Rows(*(tensor[outputs] for tensor in weight)) if self.fp8 else weight[outputs]
            wide = _wide(some_rows)
            return wide_x @ wide.T, wide_x.abs() @ wide.abs().T

        exact, size = product(some)
        out, rounding = _wide(found), 2.0**-7
        if self._gated(wide_x.shape[0]):
            gate, gate_size = exact, size
            up, up_size = product(some + width)
            exact, size = F.silu(gate) * up, 1.1 * gate_size * up.abs() + gate.abs() * up_size
        if isinstance(found, Float8Rows):
            rounding = 2.0**-4  # and values far below the largest of a row have a step of their own
            size = size + 2.0**3 * out.abs().amax(1, keepdim=True)
        # the error of x in FP8 is up to 1/16; that of sums in float32 is far below 2^-12
        off_by(self.name, out[:, some], exact, size * (2.0**-4 if rounded else 2.0**-12), rounding)


def _clone(weight: torch.Tensor | Float8Rows) -> torch.Tensor | Float8Rows:
    return Float8Rows(*(tensor.clone() for tensor in weight)) if isinstance(weight, Float8Rows) else weight.clone()


def _wide(x: torch.Tensor | Float8Rows) -> torch.Tensor:
    return x.values.float() * x.scale if isinstance(x, Float8Rows) else x.float()


def shapes(
    fp8: bool, models: dict[str, tuple[int, ...]], rows: tuple[int, ...], head_rows: tuple[int, ...] = ()
) -> list[ProductShape]:
    """Return the products of layers of models, each shape once; with ``head_rows``, those of the head too."""
    found: dict[tuple[int, int, bool, bool], ProductShape] = {}
    for model, ranks in models.items():
        config = preset(f"llama-3.1-{model}")
        for number in ranks:
            share = largest_share(config, number)
            for part, (outputs, inputs) in layer_products(config, share).items():
                shape = ProductShape(f"{model}/{number} {part}", outputs, inputs, fp8, rows)
                found.setdefault((outputs, inputs, fp8, part == GATED), shape)
            if head_rows:
                shape = ProductShape(f"{model}/{number} {HEAD}", share.words, config.hidden, False, head_rows)
                found.setdefault((*shape[1:4], False), shape)
    return list(found.values())
