"""Validation of sampling parameters and engine options."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shotcast.engine.config import EngineConfig
from shotcast.engine.grammar import Grammar
from shotcast.engine.sampling_params import MAX_STOP_TOKEN_IDS, SamplingParams, checked_token_ids
from shotcast.errors import ConfigError

ANYTHING = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats()),
    *(st.text(max_size=2), st.binary(max_size=2), st.lists(st.none())),
)


@pytest.mark.parametrize(
    ("given", "kept"),
    [("END", ("END",)), (["a", "b"], ("a", "b")), (("a",), ("a",)), ([], ())],
)
def test_stop_is_a_string_or_several(given: Any, kept: tuple[str, ...]) -> None:
    assert SamplingParams(stop=given).stop == kept


@pytest.mark.parametrize(
    "given", [[3, 5], (3, 5), np.array([3, 5], dtype=np.uint8), torch.tensor([3, 5]), (token for token in (3, 5))]
)
def test_token_ids_are_of_any_integer_type(given: Any) -> None:
    kept = SamplingParams(stop_token_ids=given).stop_token_ids
    assert kept == frozenset((3, 5))
    assert {type(token) for token in kept} == {int}


def test_stop_token_ids_are_bounded() -> None:
    assert len(SamplingParams(stop_token_ids=range(MAX_STOP_TOKEN_IDS)).stop_token_ids) == MAX_STOP_TOKEN_IDS
    with pytest.raises(ConfigError, match=f"at most {MAX_STOP_TOKEN_IDS} token ids"):
        SamplingParams(stop_token_ids=itertools.count())  # type: ignore[arg-type]


def test_the_bias_of_a_token_is_kept_by_token() -> None:
    params = SamplingParams(logit_bias={7: 1, np.int64(3): -0.5})
    assert params.logit_bias == ((3, -0.5), (7, 1.0))
    assert dataclasses.replace(params, seed=1).logit_bias == params.logit_bias
    assert params.is_constrained
    assert not SamplingParams().is_constrained


def test_the_choices_of_a_request_differ_in_limit_and_seed_alone() -> None:
    params = SamplingParams(temperature=0.5, stop="a", stop_token_ids=(3,), seed=1)
    choice = params.for_choice(7, None)
    assert choice == dataclasses.replace(params, max_tokens=7, seed=None)
    assert choice.stop_token_ids is params.stop_token_ids  # a set, checked once: each token is looked up in it
    assert isinstance(choice.stop_token_ids, frozenset)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "words must hold token ids, not None"),
        (7, "words must hold token ids, not 7"),
        ("ab", "words must hold token ids, not 'ab'"),
        (b"ab", "words must hold token ids, not b'ab'"),
        ([1, 2.0], "words holds 2.0; token ids must be whole numbers"),
        ([True], "words holds True"),
        ([1, -2], "words holds -2"),
        (torch.tensor([1.5]), "words holds tensor"),
    ],
)
def test_invalid_token_ids_are_refused(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        checked_token_ids(given, "words")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1}, "temperature must be a number of at least 0, not -1"),
        ({"temperature": math.nan}, "temperature must be a number"),
        ({"top_k": 1.5}, "top_k must be a whole number of at least 0"),
        ({"top_p": 0.0}, "use top_k=1"),
        ({"min_p": 1.1}, "min_p must be a number from 0 to 1"),
        ({"presence_penalty": 3}, "presence_penalty must be a number from -2 to 2"),
        ({"seed": 2**63}, "seed must be None or a whole number of 64 bits"),
        ({"max_tokens": -1}, "max_tokens must be a whole number of at least 0"),
        ({"stop": ""}, "stop must be a string or several, none of them empty, not ''"),
        ({"stop": ["a", ""]}, "stop must be a string or several"),
        ({"stop": None}, "stop must be a string or several"),
        ({"stop_token_ids": "ab"}, "stop_token_ids must hold token ids"),
        ({"ignore_eos": "no"}, "ignore_eos must be True or False, not 'no'"),
        ({"skip_special_tokens": 1}, "skip_special_tokens must be True or False, not 1"),
        ({"logprobs": 21}, "logprobs must be None or a whole number from 0 to 20"),
        ({"logit_bias": [1]}, "logit_bias must map token ids to numbers"),
        ({"logit_bias": {1: 101}}, "logit_bias must hold numbers from -100 to 100, not 101"),
        ({"logit_bias": {1: math.nan}}, "logit_bias must hold numbers from -100 to 100, not nan"),
        ({"logit_bias": {-1: 1}}, "logit_bias holds -1"),
        ({"logit_bias": dict.fromkeys(range(1025), 1)}, "logit_bias must hold at most 1024 tokens, not 1025"),
        ({"allowed_token_ids": []}, "allowed_token_ids must hold at least one token id"),
        ({"allowed_token_ids": [1.5]}, "allowed_token_ids holds 1.5"),
        ({"min_tokens": -1}, "min_tokens must be a whole number of at least 0"),
        ({"grammar": "start: 1"}, "grammar must be a Grammar"),
        ({"grammar": Grammar("start: 1"), "ignore_eos": True}, "ignore_eos cannot be combined with a grammar"),
        ({"prompt_logprobs": -1}, "prompt_logprobs must be None or a whole number from 0 to 20"),
    ],
)
def test_invalid_parameters_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplingParams(**options)


@given(name=st.sampled_from([field.name for field in dataclasses.fields(SamplingParams)]), value=ANYTHING)
def test_any_value_is_accepted_or_the_error_names_it(name: str, value: Any) -> None:
    assert accepts_or_names(lambda: hash(SamplingParams(**{name: value})), name)


@given(name=st.sampled_from([field.name for field in dataclasses.fields(EngineConfig)]), value=ANYTHING)
def test_any_option_is_accepted_or_the_error_names_it(name: str, value: Any) -> None:
    assert accepts_or_names(lambda: EngineConfig(**{"model": "smollm2", name: value}), name)


def accepts_or_names(make: Callable[[], object], name: str) -> bool:
    try:
        make()
    except ConfigError as error:
        return name in str(error)
    return True
