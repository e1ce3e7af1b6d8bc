"""Masks of allowed tokens: packed, from grammars against sets of strings, and computed beside the next step."""

from __future__ import annotations

import contextlib
import resource
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grammar_vocabulary import FIRST, characters, text_of, vocabulary
from shotcast.engine import token_constraints
from shotcast.engine.grammar import MAX_GRAMMAR_BYTES, Grammar, GrammarChecker, GrammarCompiler, Vocabulary
from shotcast.engine.sampler import Sampler
from shotcast.engine.sampling_params import SamplingParams
from shotcast.engine.token_constraints import NO_TOKEN_LEFT, Constraints, TokenConstraints, pack, unpack
from shotcast.errors import ConfigError

VOCAB, ENDS = 130, (3, 5)
"""More columns than tokens, and no multiple of 32."""


@pytest.fixture(scope="module")
def constraints() -> Iterator[TokenConstraints]:
    made = TokenConstraints(4, VOCAB)
    made.prepare(vocabulary(VOCAB, ENDS))
    yield made
    made.close()


def tokens_of(text: str) -> list[int]:
    return characters().encode(text).ids


def allowed(found: Constraints | None) -> set[int]:
    assert found is not None
    assert found.failures == ()
    return set(np.flatnonzero(unpack(found.masks, VOCAB)[0]).tolist())


@given(st.integers(1, 200), st.data())
def test_a_mask_keeps_its_tokens(vocab: int, data: st.DataObject) -> None:
    tokens = data.draw(st.lists(st.integers(0, vocab - 1)))
    mask = pack(tokens, vocab)
    assert mask.shape == (-(-vocab // 32),)
    assert set(np.flatnonzero(unpack(mask[None], vocab)[0]).tolist()) == set(tokens)
    assert {token for token in range(vocab) if int(mask[token // 32]) >> token % 32 & 1} == set(tokens)


@pytest.mark.full
@settings(max_examples=60, deadline=None)
@given(texts=st.lists(st.text('ab"\\ é{', min_size=1, max_size=5), min_size=1, max_size=5), data=st.data())
def test_a_grammar_allows_what_continues_one_of_its_texts(
    constraints: TokenConstraints, texts: list[str], data: st.DataObject
) -> None:
    texts = [text.replace("é", "~") for text in texts]
    constraints.assign(1, SamplingParams(grammar=Grammar.choice(texts)), (), ENDS)
    output: list[int] = []
    while True:
        so_far = text_of(output)
        wanted = {tokens_of(text[len(so_far) :])[0] for text in texts if text.startswith(so_far) and text != so_far}
        wanted |= set(ENDS) if so_far in texts else set()
        assert allowed(constraints.next([0, 1], [7, len(output)])) == wanted
        token = data.draw(st.sampled_from(sorted(wanted)))
        constraints.follow([0, 1], torch.tensor([[9, 1], [token, 1]]))
        if token in ENDS:
            assert text_of(output) in texts
            return
        output.append(token)
        if data.draw(st.integers(0, 3)) == 0:  # preempted, and assigned to the slot again
            constraints.assign(1, SamplingParams(grammar=Grammar.choice(texts)), output, ENDS)


@settings(max_examples=60, deadline=None)
@given(st.text("ab", min_size=1, max_size=6), st.text("abc", max_size=4), st.text("ab", max_size=3))
def test_a_grammar_is_followed_through_proposals(
    constraints: TokenConstraints, text: str, proposed: str, rest: str
) -> None:
    """Masks after proposals are those of the text with them; afterwards the grammar is where the output is."""
    whole = text + proposed.replace("c", "") + rest

    def follows(before: str) -> set[int]:
        if whole == before:
            return set(ENDS)
        return {tokens_of(whole[len(before) :])[0]} if whole.startswith(before) else set()

    constraints.assign(1, SamplingParams(grammar=Grammar.choice([whole])), tokens_of(text), ENDS)
    drafts = [(), tuple(tokens_of(proposed))] if proposed else [(), ()]
    found = constraints.next([0, 1], [3, len(text)], drafts)
    assert found is not None
    assert found.rows == list(range(1, len(proposed) + 2))
    for row, mask in zip(found.rows, unpack(found.masks, VOCAB), strict=True):
        wanted = follows(text + proposed[: row - 1])
        assert set(np.flatnonzero(mask).tolist()) == (wanted or set(range(VOCAB)))
        assert (row in dict(found.failures)) == (not wanted)
    accepted = max(count for count in range(len(proposed) + 1) if whole.startswith(text + proposed[:count]))
    last = min(follows(text + proposed[:accepted]))
    sampled = [*tokens_of(proposed[:accepted]), last, *[9] * (len(proposed) - accepted)]
    constraints.follow([0, 1], torch.tensor([[9, 1], *([token, 1] for token in sampled)]), drafts)
    if last not in ENDS:
        after = text + proposed[:accepted] + text_of([last])
        assert allowed(constraints.next([1], [0, len(after)])) == follows(after)


def test_constraints_combine(constraints: TokenConstraints) -> None:
    params = SamplingParams(allowed_token_ids=[40, 5, 41], min_tokens=2, stop_token_ids=[41], logit_bias={40: 2, 7: -1})
    constraints.assign(2, params, (), (*ENDS, 41))
    assert allowed(constraints.next([2], [0, 0, 1, 0])) == {40}
    found = constraints.next([0, 2], [0, 0, 2, 0])
    assert allowed(found) == {5, 40, 41}
    assert found is not None
    assert found.rows == [1]
    assert dict(zip(*(array.tolist() for array in found.biased), strict=True)) == {VOCAB + 40: 2.0, VOCAB + 7: -1.0}
    constraints.assign(2, SamplingParams(min_tokens=2), (), ENDS)
    assert allowed(constraints.next([2], [0, 0, 1, 0])) == set(range(VOCAB)) - set(ENDS)
    assert constraints.next([2], [0, 0, 2, 0]) is None
    constraints.assign(2, SamplingParams(), (), ENDS)
    assert constraints.next([2], [0, 0, 0, 0]) is None


def test_constraints_of_rows_with_proposals(constraints: TokenConstraints) -> None:
    """A row is as far in the output as its proposals are many."""
    params = SamplingParams(min_tokens=3, logit_bias={40: 2})
    constraints.assign(2, params, (), ENDS)
    constraints.assign(1, SamplingParams(min_tokens=2), (), ENDS)
    found = constraints.next([1, 0, 2], [0, 1, 1, 0], [(7,), (8, 9), (7, 7)])
    assert found is not None
    assert found.rows == [0, 5, 6, 7]
    ends = [bool(row[list(ENDS)].any()) for row in unpack(found.masks, VOCAB)]
    assert ends == [False, False, False, True]
    assert found.biased[0].tolist() == [row * VOCAB + 40 for row in (5, 6, 7)]


def test_a_row_that_nothing_may_follow_is_reported(constraints: TokenConstraints) -> None:
    constraints.assign(3, SamplingParams(grammar=Grammar.regex("a"), min_tokens=2), tokens_of("a"), ENDS)
    found = constraints.next([0, 3], [0, 0, 0, 1])
    assert found is not None
    assert found.failures == ((1, NO_TOKEN_LEFT),)
    assert unpack(found.masks, VOCAB).all()


def test_a_grammar_without_a_vocabulary_is_reported() -> None:
    alone = TokenConstraints(1, VOCAB)
    alone.assign(0, SamplingParams(grammar=Grammar.json_object()), (), ENDS)
    found = alone.next([0], [0])
    alone.close()
    assert found is not None
    assert found.failures == ((0, "the model's tokenizer supports no grammars"),)


def test_a_fault_of_the_library_ends_only_its_requests(constraints: TokenConstraints) -> None:
    class Faulty:
        def consume_tokens(self, tokens: list[int]) -> None:
            raise SystemError("a panic")

    for slot in (0, 1):
        constraints.assign(slot, SamplingParams(grammar=Grammar.regex("a+")), (), ENDS)
    assert constraints.next([0, 1], [0, 0]) is not None
    constraints._states[1].matcher = Faulty()
    constraints.follow([1], torch.tensor([[tokens_of("a")[0], 1]]))
    constraints.follow([0], torch.tensor([[tokens_of("a")[0], 1]]))
    found = constraints.next([0, 1], [1, 1])
    assert found is not None
    assert found.failures == ((1, "a panic"),)
    assert set(np.flatnonzero(unpack(found.masks, VOCAB)[0]).tolist()) == {*ENDS, *tokens_of("a")}


def test_a_new_request_waits_for_the_last_mask_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have the row of their slot in one table."""
    arrived = threading.Event()

    class LateCopy:
        def __init__(self, tensors: list[torch.Tensor]):
            self._tensors = tensors

        def wait(self) -> list[torch.Tensor]:
            assert arrived.wait(200)
            return self._tensors

    monkeypatch.setattr(token_constraints, "HostCopy", LateCopy)
    made = TokenConstraints(1, VOCAB)
    made.prepare(vocabulary(VOCAB, ENDS))
    made.assign(0, SamplingParams(grammar=Grammar.choice(["ab"])), (), ENDS)
    made.next([0], [0])
    made.follow([0], torch.tensor([[tokens_of("a")[0], 1]]))
    made.assign(0, SamplingParams(grammar=Grammar.choice(["xy"])), (), ENDS)
    threading.Timer(0.1, arrived.set).start()
    assert allowed(made.next([0], [0])) == set(tokens_of("x"))
    time.sleep(0.1)
    assert allowed(made.next([0], [0])) == set(tokens_of("x"))
    made.close()


def test_masks_are_computed_beside_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host gets the tokens of a step late: only the next sampling of a row with a grammar waits for them."""
    arrived = threading.Event()

    class LateCopy:
        def __init__(self, tensors: list[torch.Tensor]):
            self._tensors = tensors

        def wait(self) -> list[torch.Tensor]:
            assert arrived.wait(200)
            return self._tensors

    monkeypatch.setattr(token_constraints, "HostCopy", LateCopy)
    sampler = Sampler(2, VOCAB, "cpu", salt=0)
    sampler.constraints.prepare(vocabulary(VOCAB, ENDS))
    sampler.assign(0, SamplingParams(grammar=Grammar.choice(["ab"]), temperature=0), "a", ())
    sampler.assign(1, SamplingParams(temperature=0), "b", ())

    def sample(slots: list[int]) -> list[int]:
        x = torch.arange(VOCAB).float().repeat(len(slots), 1)
        best = torch.tensor([[VOCAB - 1, 1]] * len(slots))
        found: list[int] = (
            sampler.sample(x, slots, best, torch.zeros(3, dtype=torch.int64), False).tokens[:, 0].tolist()
        )
        return found

    assert sample([0, 1]) == [*tokens_of("a"), VOCAB - 1]
    assert sample([1]) == [VOCAB - 1]
    started = time.perf_counter()
    threading.Timer(0.2, arrived.set).start()
    assert sample([1, 0]) == [VOCAB - 1, *tokens_of("b")]
    assert time.perf_counter() - started > 0.1
    assert sample([0]) == [max(ENDS)], "every end token is allowed"
    sampler.constraints.close()


# -- grammars ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(vocabulary(VOCAB, ENDS))


@pytest.fixture(scope="module")
def checker() -> Iterator[GrammarChecker]:
    made = GrammarChecker(vocabulary(VOCAB, ENDS))
    yield made
    made.close()


def accepts(compiler: GrammarCompiler, grammar: Grammar, text: str) -> bool:
    matcher, _ = compiler.matcher(grammar)
    tokens = tokens_of(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def test_json_is_on_one_line(compiler: GrammarCompiler) -> None:
    grammar = Grammar.json_object()
    for text in ('{"a": [1, {"b": null}]}', '{"a":[1,{"b":null}]}', "{}"):
        assert accepts(compiler, grammar, text)
    for text in ('{ "a": 1}', '{"a":  1}', '{"a": 1 }', "[]", '{"a": 1'):
        assert not accepts(compiler, grammar, text)


def test_other_grammars(compiler: GrammarCompiler) -> None:
    assert accepts(compiler, Grammar.regex(r"[a/]\d{2}\""), '/07"')
    assert not accepts(compiler, Grammar.regex(r"[a/]\d{2}\""), '/07" ')
    for text in ('root ::= "a" [0-9]+', 'start: "a" /[0-9]+/'):
        assert accepts(compiler, Grammar.context_free(text), "a12")
        assert not accepts(compiler, Grammar.context_free(text), "a")


def test_only_a_strict_schema_is_refused_for_what_cannot_be_enforced(compiler: GrammarCompiler) -> None:
    schema = {"type": "string", "not": {"const": "a"}}
    assert accepts(compiler, Grammar.json_schema(schema, strict=False), '"b"')
    with pytest.raises(ConfigError, match=r"Unimplemented keys: ..not."):
        compiler.compile(Grammar.json_schema(schema))


def nested(keyword: str, depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object", "properties": {"x": {"type": "string"}}}
    for _ in range(depth):
        schema = {keyword: [schema, schema]}
    return schema


def object_of(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(count)}}


START_S = 1.0
"""Processor time of the process until it reads grammars."""

EXPLODING = {
    "patterns": {"type": "object", "patternProperties": {f"^a{i}.*b{i}$": {"type": "integer"} for i in range(1500)}},
    "intersection": {"allOf": [{"type": "string", "pattern": f"x.{{{i}}}y"} for i in range(1400)]},
    "anyOf": nested("anyOf", 16),
    "some anyOf": nested("anyOf", 9),
    "allOf": nested("allOf", 16),
    "products": {"allOf": [{"anyOf": [{"properties": {f"{i}{j}": {}}} for j in range(4)]} for i in range(16)]},
    "properties": object_of(20_000),
    "some properties": object_of(1_900),
    "branches": {"anyOf": [object_of(1) | {"title": str(number)} for number in range(900)]},
    "repetition": {"type": "string", "pattern": "^((a{1,1000}){1,1000}){1,1000}$"},
    "automaton": {"type": "string", "pattern": "(.*a.{40}b){9}"},
    "multiple": {"type": "integer", "multipleOf": 982451653},
    "depth": nested("allOf", 1) | {"items": nested("oneOf", 10)},
    "references": {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}}},
    "items": {"type": "array", "minItems": 10**6, "items": {"type": "array", "minItems": 10**6}},
}


@pytest.mark.timing
@pytest.mark.parametrize("name", EXPLODING)
def test_no_schema_takes_a_second(checker: GrammarChecker, name: str) -> None:
    """It is refused or compiled, with the mask of the first token."""
    checker.check(Grammar.regex("a"))  # the process runs
    started = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    with contextlib.suppress(ConfigError):
        checker.check(Grammar.json_schema(EXPLODING[name]))
    took = time.perf_counter() - started[0]
    if took > 1:  # on a busy machine, what counts is the time of the processor until the process was ended
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        took = used.ru_utime + used.ru_stime - started[1].ru_utime - started[1].ru_stime
    assert took < 1 + START_S


@pytest.mark.full
def test_a_grammar_that_takes_too_long_is_refused_and_the_next_is_compiled(checker: GrammarChecker) -> None:
    for _ in range(2):  # the second time without a process
        with pytest.raises(ConfigError, match="too complex: it takes more than"):
            checker.check(Grammar.json_schema(EXPLODING["patterns"]))
    assert checker.check(Grammar.regex("abc")) > 0
    assert checker.check(Grammar.regex("abc")) == 0


@pytest.mark.timing
def test_a_known_grammar_does_not_wait_for_another(checker: GrammarChecker) -> None:
    checker.check(Grammar.regex("known"))

    def waits(number: int) -> bool:
        schema = EXPLODING["patterns"] | {"title": f"another {number}"}

        def check() -> None:
            with contextlib.suppress(ConfigError):
                checker.check(Grammar.json_schema(schema))

        other = threading.Thread(target=check)
        other.start()
        times = []
        while other.is_alive():
            started = time.perf_counter()
            assert checker.check(Grammar.regex("known")) == 0
            times.append(time.perf_counter() - started)
            time.sleep(0.01)
        return len(times) <= 5 or max(times) >= 0.3

    assert not all(waits(number) for number in range(10)), "at times, another process has the processor"


def test_the_checking_process_ends_with_its_client(checker: GrammarChecker) -> None:
    checker.check(Grammar.regex("ab"))
    assert checker._process is not None
    process = checker._process
    checker.close()
    assert process.poll() is not None
    with pytest.raises(ConfigError, match="no end token"):
        GrammarChecker(Vocabulary(characters().to_str(), VOCAB, ())).check(Grammar.regex("a"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Grammar("  "), "must not be empty"),
        (lambda: Grammar("a" * (MAX_GRAMMAR_BYTES + 1)), f"takes {MAX_GRAMMAR_BYTES + 1} bytes; it may take"),
        (lambda: Grammar.choice([]), "one text or more"),
        (lambda: Grammar.choice(["a", ""]), "none of them empty"),
        (lambda: Grammar.regex("("), "cannot be compiled: .*unclosed group"),
        (lambda: Grammar.context_free("root ::= ("), "the grammar cannot be read"),
        (lambda: Grammar.context_free("start: other"), "cannot be compiled: .*other"),
        (lambda: Grammar.json_schema({"type": "strin"}), "cannot be compiled: .*strin"),
        (lambda: Grammar.json_schema({"$ref": "http://localhost/a"}), "cannot be compiled: .*localhost"),
        (lambda: Grammar.json_schema({"minimum": 3, "maximum": 2, "type": "integer"}), "cannot be compiled: "),
        (lambda: Grammar.regex("é"), "no tokens of the model spell"),
    ],
)
def test_a_wrong_grammar_is_refused(compiler: GrammarCompiler, make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compiler.compile(make())


def test_a_grammar_is_compiled_once(compiler: GrammarCompiler) -> None:
    first = compiler.compile(Grammar.regex("abc+"))
    assert compiler.compile(Grammar.regex("abc+")) is first
    for number in range(70):
        compiler.compile(Grammar.choice([f"{number}"]))
    assert compiler.compile(Grammar.regex("abc+")) is not first
    assert compiler.compile.cache_info().currsize == 64


def test_matchers_of_one_grammar_are_independent(compiler: GrammarCompiler) -> None:
    (one, _), (other, _) = (compiler.matcher(Grammar.choice(["ab"])) for _ in range(2))
    assert one.consume_tokens(tokens_of("ab"))
    assert not other.is_accepting()


def test_a_grammar_has_as_many_matchers_as_it_says(compiler: GrammarCompiler) -> None:
    """The library computes the masks of copies of one matcher one by one."""
    quick, slow = Grammar('start: "gh"', 3), Grammar('start: "cd"')
    assert [compiler.matcher(quick)[1] for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    assert [compiler.matcher(slow)[1] for _ in range(3)] == [0, 0, 0]
    assert len(compiler.compile(quick).matchers) == 3
    first, second = (compiler.matcher(quick)[0] for _ in range(2))
    assert first.consume_tokens(tokens_of("gh"))
    assert not second.is_accepting()


def test_a_spoilt_matcher_is_compiled_again(compiler: GrammarCompiler) -> None:
    class Spoilt:
        def deep_copy(self) -> Spoilt:
            return self

        def is_error(self) -> bool:
            return True

    grammar = Grammar('start: "ef"')
    compiler.compile(grammar).matchers[0] = Spoilt()
    matcher, _ = compiler.matcher(grammar)
    assert matcher.consume_tokens(tokens_of("ef"))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (Vocabulary("{}", VOCAB, ENDS), "this tokenizer supports no grammars: "),
        (Vocabulary(characters().to_str(), VOCAB, ()), "no end token"),
    ],
)
def test_other_tokenizers_are_refused(wrong: Vocabulary, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GrammarCompiler(wrong)


def test_characters_are_tokens() -> None:
    assert characters().encode(" a~").ids == [FIRST, FIRST + 65, FIRST + 94]
