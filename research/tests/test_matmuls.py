"""research/matmuls.py in the interpreter."""

from __future__ import annotations

from typing import Any

import pytest
from large_gemm import GemmConfig
from matmuls import LibraryProduct, ShapedProduct
from matmuls_targets import products

from quick_interpreter import interpret
from shotcast.errors import ConfigError


@pytest.mark.full
def test_ours_and_the_librarys_agree() -> None:
    (found,) = interpret(products, 1)
    assert found == []


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (lambda: ShapedProduct(sms=0), "takes at least one SM"),
        (lambda: ShapedProduct(GemmConfig(), sms=100), "sms is for persistent products"),
        (lambda: LibraryProduct(-1), "from 0 up"),
    ],
)
def test_impossible_products_are_refused(wrong: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        wrong()
