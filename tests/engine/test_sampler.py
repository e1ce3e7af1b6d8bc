"""The sampler: compared with float64 references, by statistics, and for independence from batch and slot."""

from __future__ import annotations

import itertools
import math
import random
import statistics
import struct
import time
from collections.abc import Sequence

import pytest
import sampler_targets as targets
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from quick_interpreter import interpret
from shotcast.engine import torch_sampling
from shotcast.engine.sampler import MAX_VOCAB, Sampler, SamplerOutput, noise_key, token_logprobs
from shotcast.engine.sampling_params import SamplingParams
from shotcast.engine.torch_sampling import exponential, likeliest, nucleus, scramble
from shotcast.errors import ConfigError

VOCAB = 32


def params(**changes: object) -> SamplingParams:
    return SamplingParams(**changes)  # type: ignore[arg-type]


def logits(rows: int, vocab: int = VOCAB, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def best_of(x: torch.Tensor) -> torch.Tensor:
    best = x.argmax(1)
    return torch.stack((best, torch.ones_like(best)), dim=1)


def sample_all(sampler: Sampler, x: torch.Tensor, slots: Sequence[int]) -> SamplerOutput:
    last_tokens = torch.full([max(slots) + 2], -1, device=x.device)
    made = sampler.sample(x, slots, best_of(x), last_tokens, False)
    if x.device.type == "cpu":
        assert last_tokens[list(slots)].tolist() == made.tokens[:, 0].tolist()
        assert int((last_tokens == -1).sum()) == len(last_tokens) - len(slots)
    return made


def tokens_of(sampler: Sampler, x: torch.Tensor, slots: Sequence[int]) -> torch.Tensor:
    return sample_all(sampler, x, slots).tokens[:, 0]


def reference(row: torch.Tensor, p: SamplingParams, output: tuple[int, ...] = ()) -> list[float]:
    """Return the probabilities, computed filter by filter."""
    x = [float(value) for value in row]
    for token in range(len(x)):
        count = output.count(token)
        if count:
            x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
        x[token] -= p.frequency_penalty * count + (p.presence_penalty if count else 0)
    order = sorted(range(len(x)), key=lambda token: (-x[token], token))
    if p.greedy:
        return [float(token == order[0]) for token in range(len(x))]
    weights = [math.exp((value - max(x)) / p.temperature) for value in x]
    kept = order[: p.top_k] if p.top_k else order
    total = sum(weights[token] for token in kept)
    upto = 0.0
    nucleus = []
    for token in kept:
        if upto >= p.top_p * total and p.top_p < 1:
            break
        nucleus.append(token)
        upto += weights[token]
    kept = [token for token in nucleus if weights[token] >= p.min_p * weights[order[0]]]
    total = sum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in range(len(x))]


def samples(row: torch.Tensor, p: SamplingParams, count: int, output: tuple[int, ...] = ()) -> torch.Tensor:
    """Sample one token from ``row`` for each of ``count`` requests."""
    sampler = Sampler(count, len(row), "cpu", salt=1)
    for slot in range(count):
        sampler.assign(slot, p, f"request {slot}", output)
    return tokens_of(sampler, row.expand(count, -1), range(count))


def chi_square(observed: list[int], expected: list[float]) -> float:
    """Return the chi-square statistic as standard deviations above its mean (Wilson and Hilferty).

    Fail if a value occurs whose expectation is 0.
    """
    assert all(o == 0 for o, e in zip(observed, expected, strict=True) if e == 0)
    pairs = [(o, e) for o, e in zip(observed, expected, strict=True) if e >= 5]
    rest = [(o, e) for o, e in zip(observed, expected, strict=True) if 0 < e < 5]
    if rest:
        pairs.append((sum(o for o, _ in rest), sum(e for _, e in rest)))
    freedom = len(pairs) - 1
    if freedom == 0:
        return 0.0
    statistic = sum((o - e) ** 2 / e for o, e in pairs)
    return ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))


SETTINGS = [
    params(),
    params(temperature=0.5),
    params(temperature=3.0),
    params(top_k=1),
    params(top_k=5),
    params(top_k=1000),
    params(top_p=0.7),
    params(top_p=1e-9),
    params(min_p=0.2),
    params(min_p=1.0),
    params(top_k=12, top_p=0.8),
    params(temperature=2.5, top_k=20, top_p=0.9, min_p=0.15),
    params(top_p=0.9, min_p=0.3),
    params(temperature=1.3, top_k=9, min_p=0.1),
    params(presence_penalty=1.5),
    params(frequency_penalty=-0.7),
    params(temperature=0.8, presence_penalty=-1.0, frequency_penalty=0.5, top_p=0.9),
    params(temperature=0, frequency_penalty=2.0),
    params(repetition_penalty=1.7),
    params(temperature=0.8, repetition_penalty=0.6, presence_penalty=0.4, top_k=9),
    params(temperature=0, repetition_penalty=3.0),
]


@pytest.mark.parametrize("p", SETTINGS, ids=[f"{number}" for number in range(len(SETTINGS))])
def test_samples_have_the_requested_distribution(p: SamplingParams) -> None:
    row = logits(1)[0]
    output = (int(row.argmax()),) * 2 + (3, 4, 4, 4)
    count = 4000
    observed = samples(row, p, count, output).bincount(minlength=VOCAB).tolist()
    expected = [count * probability for probability in reference(row, p, output)]
    assert abs(chi_square(observed, expected)) < 4


@pytest.mark.full
def test_kernels_sample_from_the_requested_distribution() -> None:
    """All settings are sampled in one step, by Triton's interpreter."""
    row = logits(1)[0]
    output = (int(row.argmax()),) * 2 + (3, 4, 4, 4)
    kinds = [SETTINGS[number] for number in (10, 11, 16)]
    (found,) = interpret(targets.token_counts, 1, row, kinds, 120, output)
    for p, observed in zip(kinds, found, strict=True):
        assert abs(chi_square(observed, [120 * probability for probability in reference(row, p, output)])) < 4


CONSTRAINED = [
    params(logit_bias={4: 3.0, 9: -50.0}, seed=4, logprobs=2),
    params(allowed_token_ids=[2, 3, 5, 7, 11], temperature=0, frequency_penalty=1.0),
    params(min_tokens=6, logit_bias={targets.END: 9.0}, seed=8),
    params(temperature=0, logprobs=0),
    params(temperature=0),
]


def test_proposals_change_no_token() -> None:
    """Outputs with proposals, some of them wrong, equal those without, whatever the parameters."""
    kinds = [*SETTINGS, *CONSTRAINED]
    plain, logprobs, steps = targets.outputs_of(kinds, VOCAB, 40, False)
    assert steps == 40
    assert len(set(map(tuple, plain))) > 20
    found, with_proposals, steps = targets.outputs_of(kinds, VOCAB, 40, False, plain)
    assert found == plain
    assert with_proposals == logprobs
    assert 15 < steps < 40


@pytest.mark.full
def test_proposals_change_no_token_of_the_kernels() -> None:
    kinds = [*(SETTINGS[number] for number in (0, 11, 16, 18)), *CONSTRAINED[:4]]
    ((plain, logprobs, _),) = interpret(targets.outputs_of, 1, kinds, VOCAB, 9, True)
    ((found, with_proposals, steps),) = interpret(targets.outputs_of, 1, kinds, VOCAB, 9, True, plain)
    assert (found, with_proposals) == (plain, logprobs)
    assert steps < 9


def test_a_greedy_step_with_proposals_runs_without_noise() -> None:
    kinds = [params(temperature=0)] * 3
    plain, _, _ = targets.outputs_of(kinds, VOCAB, 12, False)
    assert plain[0] == plain[1] == [int(targets.logits_after(plain[0][:place], VOCAB).argmax()) for place in range(12)]
    assert targets.outputs_of(kinds, VOCAB, 12, False, plain)[0] == plain


@pytest.mark.parametrize("number", [0, 11, 16, 19])
def test_accepted_tokens_have_the_requested_distribution(number: int) -> None:
    """A proposal is accepted with its probability, as by rejection sampling; so the distribution does not change, of
    the first token or of the one after an accepted proposal."""
    p, count, output = SETTINGS[number], 4000, (3, 4, 4, 4)
    first, second = logits(2, seed=number)
    expected = reference(first, p, output)
    proposal = sorted(range(VOCAB), key=lambda token: -expected[token])[1]
    sampler = Sampler(count, VOCAB, "cpu", salt=2)
    for slot in range(count):
        sampler.assign(slot, p, f"request {slot}", output)
    x = torch.stack((first, second)).repeat(count, 1)
    last_tokens = torch.zeros(count, dtype=torch.int64)
    made = sampler.sample(x, range(count), best_of(x), last_tokens, False, [(proposal,)] * count)
    one, two = made.tokens[:, 0].view(count, 2).T
    assert abs(chi_square(one.bincount(minlength=VOCAB).tolist(), [count * each for each in expected])) < 4
    accepted = one == proposal
    probability, times = expected[proposal], int(accepted.sum())
    assert abs(times - count * probability) < 4 * math.sqrt(count * probability * (1 - probability))
    after = reference(second, p, (*output, proposal))
    assert abs(chi_square(two[accepted].bincount(minlength=VOCAB).tolist(), [times * each for each in after])) < 4
    assert last_tokens.equal(torch.where(accepted, two, one))


@pytest.mark.full
def test_positions_of_one_output_are_independent() -> None:
    """This tests pairs of successive tokens of one request."""
    row = logits(1, vocab=4, scale=1.0)[0]
    sampler = Sampler(1, 4, "cpu", salt=0)
    sampler.assign(0, params(seed=7), "a", ())
    last_tokens = [int(tokens_of(sampler, row[None], [0])) for _ in range(8001)]
    probabilities = row.softmax(0).tolist()
    observed = [0] * 16
    for first, second in itertools.pairwise(last_tokens):
        observed[4 * first + second] += 1
    expected = [8000 * a * b for a in probabilities for b in probabilities]
    assert chi_square(observed, expected) < 4


@pytest.mark.full
def test_a_large_flat_vocabulary_is_sampled_evenly() -> None:
    vocab, count = 50_000, 1000
    tokens = samples(torch.zeros(vocab), params(), count)
    # About count^2 / (2 vocab) = 10 pairs are equal.
    assert count - 30 < len(tokens.unique())
    assert chi_square((tokens // (vocab // 20)).bincount(minlength=20).tolist(), [count / 20] * 20) < 4


def scrambled(x: int, key: tuple[int, int]) -> int:
    x ^= key[0]
    x ^= x >> 16
    x = x * 0x21F0AAAD % 2**32
    x ^= x >> 15
    x ^= key[1]
    x = x * 0xD35A2D97 % 2**32
    return x ^ (x >> 15)


def test_the_hash_matches_its_definition() -> None:
    """Products wrap and shifts bring in zeros, in vectors and in the remainder after them."""
    generator = random.Random(0)
    values = [generator.randrange(2**32) for _ in range(77)]
    keys = [(generator.randrange(2**32), generator.randrange(2**32)) for _ in range(3)]

    def signed(value: int) -> int:
        return value - 2**32 if value >= 2**31 else value

    x = torch.tensor([[signed(value) for value in values]] * 3, dtype=torch.int32)
    key = torch.tensor([[signed(half) for half in pair] for pair in keys], dtype=torch.int32)
    assert scramble(x, key).tolist() == [[signed(scrambled(value, pair)) for value in values] for pair in keys]


def test_noise_is_uniform_and_has_no_pattern_over_tokens_positions_and_seeds() -> None:
    tokens = scramble(torch.arange(256, dtype=torch.int32)[None], torch.zeros(1, 2, dtype=torch.int32))

    def noise(keys: list[bytes]) -> torch.Tensor:
        key = torch.frombuffer(bytearray(b"".join(keys)), dtype=torch.int32).view(-1, 2)
        return scramble(tokens.expand(len(keys), -1).clone(), key)

    for keys in ([noise_key(5, place) for place in range(512)], [noise_key(seed, 5) for seed in range(512)]):
        bits = noise(keys)
        cells = bits.numel() / 256
        for shift in (0, 8, 16, 24):
            found = ((bits >> shift) & 0xFF).flatten().bincount(minlength=256).tolist()
            assert abs(chi_square(found, [cells] * 256)) < 4
        high = (bits >> 27) & 0xF
        for a, b in ((high[1:], high[:-1]), (high[:, 1:], high[:, :-1]), (high[1:, 1:], high[:-1, :-1])):
            found = (a * 16 + b).flatten().bincount(minlength=256).tolist()
            assert abs(chi_square(found, [a.numel() / 256] * 256)) < 4


def test_times_are_exponential_positive_and_finite() -> None:
    bits = torch.tensor([0, -(2**31), 2**31 - 1, -1, 1], dtype=torch.int32)
    edge = exponential(bits)
    assert edge.isfinite().all()
    assert (edge > 0).all()
    assert edge[0] == edge[1] == pytest.approx(2.0**-32)
    assert edge[4] == pytest.approx(3 * 2.0**-32)
    even = exponential(torch.arange(0, 2**31, 2**17, dtype=torch.int64).int()).double()
    assert even.mean().item() == pytest.approx(1, abs=2e-3)
    assert even.square().mean().item() == pytest.approx(2, abs=2e-2)
    assert even.median().item() == pytest.approx(math.log(2), abs=1e-3)


values = st.sampled_from([-math.inf, -3.5, -1.0, -0.0, 0.0, 0.25, 0.5, 2.0])


@given(st.lists(st.lists(values, min_size=9, max_size=9), min_size=1, max_size=3), st.integers(1, 9))
def test_the_likeliest_are_in_order_and_the_lower_first(rows: list[list[float]], count: int) -> None:
    found, places = likeliest(torch.tensor(rows), count)
    for row, some, where in zip(rows, found.tolist(), places.tolist(), strict=True):
        order = sorted(range(9), key=lambda place: (-row[place], place))[:count]
        assert where == order
        assert some == [row[place] for place in order]


@given(
    st.lists(values, min_size=12, max_size=12),
    st.integers(0, 12),
    st.floats(0.01, 1),
    st.integers(1, 12),
)
def test_top_k_and_top_p_keep_what_the_reference_keeps(row: list[float], top_k: int, top_p: float, count: int) -> None:
    assume(max(row) > -math.inf)
    p = params(top_k=top_k, top_p=top_p)
    weights = sorted((math.exp(value - max(row)) for value in row), reverse=True)[: top_k or None]
    for end in range(len(weights)):  # leave out cases that rounding decides
        assume(top_p == 1 or abs(sum(weights[: end + 1]) - top_p * sum(weights)) > 1e-5)
    kept = {token for token, probability in enumerate(reference(torch.tensor(row), p)) if probability}
    count = max(count, top_k)
    x = torch.tensor([row]) - max(row)
    found, tokens = likeliest(x, count)
    total = x.exp().sum(1, dtype=torch.float64)
    keep, complete = nucleus(found, total, torch.tensor([top_k]), torch.tensor([top_p], dtype=torch.float64))
    mine = {
        token for token, k, value in zip(tokens[0].tolist(), keep[0], found[0], strict=True) if k and value > -math.inf
    }
    assert mine == kept if complete.item() or count == len(row) else mine <= kept


def test_top_p_of_one_keeps_tokens_that_rounding_would_lose() -> None:
    found = torch.tensor([[0.0, -50.0, -80.0]])
    one = torch.ones(1, dtype=torch.float64)
    assert nucleus(found, one, torch.tensor([0]), one)[0].all()


def test_many_equal_logits_are_in_order_too() -> None:
    x = torch.zeros(2, 5000)
    for count in (3000, 5000):
        assert likeliest(x, count)[1].equal(torch.arange(count).expand(2, -1))


@pytest.mark.parametrize("scale", [0.01, 3.0])
@pytest.mark.parametrize("cached", [1, 2**16])
def test_a_nucleus_larger_than_the_first_search(monkeypatch: pytest.MonkeyPatch, scale: float, cached: int) -> None:
    row = logits(1, scale=scale)[0]
    p = params(top_p=0.8)
    before = samples(row, p, 500)
    monkeypatch.setattr(torch_sampling, "FIRST_NUCLEUS", 4)
    monkeypatch.setattr(torch_sampling, "CACHED_LOGITS", cached)
    assert samples(row, p, 500).equal(before)
    assert len(before.unique()) > (4 if scale == 0.01 else 1)


def test_top_k_larger_than_the_first_search_next_to_a_row_without() -> None:
    """The rows are processed together on a CPU."""
    x = logits(2, vocab=4096, scale=0.1)
    sampler = Sampler(2, 4096, "cpu", salt=0)
    sampler.assign(0, params(top_k=2000), "a", ())
    sampler.assign(1, params(top_p=0.5), "b", ())
    kept = x.argsort(dim=1, descending=True)[0, :2000].tolist()
    for _ in range(50):
        assert int(tokens_of(sampler, x, [0, 1])[0]) in kept


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 5e-324])
@pytest.mark.parametrize("changes", [{}, {"top_p": 0.9}, {"min_p": 0.5}])
def test_a_low_temperature_takes_the_likeliest(temperature: float, changes: dict[str, float]) -> None:
    row = logits(1, scale=100.0)[0]
    row[[3, 9]] = row.max() + 1
    assert set(samples(row, params(temperature=temperature, **changes), 50).tolist()) == {3, 9}


def test_greedy_takes_the_first_of_the_largest() -> None:
    x = torch.tensor([[0.0, 2.0, 2.0, 1.0], [3.0, 3.0, 3.0, 3.0]])
    sampler = Sampler(2, 4, "cpu", salt=0)
    for slot in range(2):
        sampler.assign(slot, params(temperature=0), "a", ())
    assert tokens_of(sampler, x, [0, 1]).tolist() == [1, 0]


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_nothing_runs_when_all_are_greedy() -> None:
    sampler = Sampler(2, VOCAB, "cpu", salt=0)
    for slot in range(2):
        sampler.assign(slot, params(temperature=0, top_k=5), "a", ())
    x = logits(2)
    best, last_tokens = best_of(x), torch.zeros(2, dtype=torch.int64)
    with Operations() as operations:
        made = sampler.sample(x, [0, 1], best, last_tokens, True)
    assert operations.names == []
    assert made.tokens is best


def test_sampling_does_not_modify_best() -> None:
    sampler = Sampler(2, VOCAB, "cpu", salt=0)
    sampler.assign(0, params(temperature=0), "a", ())
    sampler.assign(1, params(temperature=5.0, seed=1), "b", ())
    x = logits(2)
    best = best_of(x)
    best[1, 1] = 0  # the flag of a row stays with it
    kept = best.clone()
    changed = 0
    for _ in range(20):
        made = sampler.sample(x, [0, 1], best, torch.zeros(2, dtype=torch.int64), True)
        assert made.tokens[0].equal(kept[0])
        assert made.tokens[1, 1] == 0
        changed += int(made.tokens[1, 0] != kept[1, 0])
    assert best.equal(kept)
    assert changed > 0


def mixed(count: int) -> list[SamplingParams]:
    kinds = [
        params(seed=1),
        params(temperature=0),
        params(top_p=0.8),
        params(top_k=7, seed=3, logprobs=2),
        params(min_p=0.1, presence_penalty=0.5),
        params(temperature=0, frequency_penalty=1.0),
    ]
    return [kinds[number % len(kinds)] for number in range(count)]


def outputs(order: list[int], slots: list[int], again_at: int | None, salt: int = 5) -> dict[int, list[int]]:
    """Return the outputs of requests whose logits depend on their output, in batches of this order and these slots."""
    kinds = mixed(len(order))
    sampler = Sampler(32, VOCAB, "cpu", salt=salt)
    texts: dict[int, list[int]] = {number: [] for number in order}
    for number, slot in zip(order, slots, strict=True):
        sampler.assign(slot, kinds[number], f"{number}", ())
    for step in range(10):
        if step == again_at:  # preempted, and in another slot now
            slots = [31 - slot for slot in slots]
            for number, slot in zip(order, slots, strict=True):
                sampler.assign(slot, kinds[number], f"{number}", texts[number])
        rows = [logits(1, seed=hash((number, *texts[number])) % 2**32)[0] for number in order]
        tokens = tokens_of(sampler, torch.stack(rows), slots).tolist()
        for number, token in zip(order, tokens, strict=True):
            texts[number].append(token)
    return texts


def test_samples_depend_on_neither_batch_nor_slot_nor_preemption() -> None:
    plain = outputs(list(range(12)), list(range(12)), None)
    assert outputs(list(range(11, -1, -1)), [2 * number for number in range(12)], None) == plain
    assert outputs(list(range(12)), list(range(12)), 4) == plain
    alone = {}
    for number in range(12):
        sampler = Sampler(1, VOCAB, "cpu", salt=5)
        sampler.assign(0, mixed(12)[number], f"{number}", ())
        text: list[int] = []
        for _ in range(10):
            x = logits(1, seed=hash((number, *text)) % 2**32)
            text.append(int(tokens_of(sampler, x, [0])))
        alone[number] = text
    assert alone == plain


def test_requests_without_a_seed_sample_by_salt_and_id() -> None:
    first, second = (outputs(list(range(12)), list(range(12)), None, salt) for salt in (1, 2))
    differ = {number for number in range(12) if first[number] != second[number]}
    assert differ == {number for number in range(12) if not mixed(12)[number].greedy and mixed(12)[number].seed is None}
    row = logits(1, scale=0.1)[0]
    assert len(samples(row, params(), 50).unique()) > 10
    assert len(samples(row, params(seed=4), 50).unique()) == 1


def test_penalties_count_samples_and_a_new_request_starts_over() -> None:
    x = torch.zeros(1, 4)
    sampler = Sampler(1, 4, "cpu", salt=0)
    for _ in range(2):
        sampler.assign(0, params(temperature=0, frequency_penalty=1.0), "a", (0,))
        assert [int(tokens_of(sampler, x, [0])) for _ in range(5)] == [1, 2, 3, 0, 1]


def test_repetition_penalty_covers_the_prompt_and_is_that_of_transformers() -> None:
    row, prompt = logits(1)[0], (3, int(logits(1)[0].argmax()), 5, 3)
    p = params(temperature=0, repetition_penalty=1.6)
    sampler = Sampler(2, VOCAB, "cpu", salt=0)
    sampler.assign(0, params(temperature=0, frequency_penalty=0.1), "other", ())
    sampler.assign(1, p, "a", (), prompt)
    context = list(prompt)
    for _ in range(12):
        wanted = RepetitionPenaltyLogitsProcessor(p.repetition_penalty)(torch.tensor([context]), row.clone()[None])
        token = int(tokens_of(sampler, row.expand(2, -1), [0, 1])[1])
        assert token == int(wanted.argmax())
        context.append(token)
    sampler.assign(1, params(temperature=0, frequency_penalty=1.0), "b", ())
    assert int(tokens_of(sampler, row[None], [1])) == prompt[1], "a prompt's tokens outlast its request"


def test_only_the_output_counts_for_the_other_penalties() -> None:
    x = torch.tensor([[3.0, 2.9, 0.0]])
    sampler = Sampler(1, 3, "cpu", salt=0)
    sampler.assign(0, params(temperature=0, frequency_penalty=1.0, repetition_penalty=1.0001), "a", (), (0, 0))
    assert [int(tokens_of(sampler, x, [0])) for _ in range(3)] == [0, 1, 0]


def test_logits_are_not_modified() -> None:
    x = logits(6)
    before = x.clone()
    sampler = Sampler(6, VOCAB, "cpu", salt=0)
    for slot, kind in enumerate(mixed(6)):
        sampler.assign(slot, kind, "a", (1, 2))
    sample_all(sampler, x, range(6))
    assert x.equal(before)


def test_log_probabilities_are_those_of_the_model() -> None:
    x = logits(4)
    x[0, 5] = x[0, 6] = x[0].max() + 1
    sampler = Sampler(4, VOCAB, "cpu", salt=0)
    kinds = [
        params(temperature=0, logprobs=3),
        params(logprobs=None),
        params(temperature=9.0, top_p=0.9, presence_penalty=2.0, logprobs=0),
        params(temperature=9.0, logprobs=20),
    ]
    for slot, kind in enumerate(kinds):
        sampler.assign(slot, kind, "a", (1,))
    made = sample_all(sampler, x, range(4))
    tokens = made.tokens[:, 0]
    found = token_logprobs(tokens.tolist(), made.logprob_rows, made.logprobs)
    expected = x.double().log_softmax(1)
    for row, (kind, token, entry) in enumerate(zip(kinds, tokens.tolist(), found, strict=True)):
        if kind.logprobs is None:
            assert entry is None
            continue
        assert entry is not None
        assert entry.token == token
        assert entry.logprob == pytest.approx(expected[row, token].item(), abs=1e-5)
        assert entry.rank == 1 + int((expected[row] > expected[row, token]).sum())
        order = sorted(range(VOCAB), key=lambda t: (-expected[row, t].item(), t))[: kind.logprobs]
        assert [t for t, _ in entry.top] == order
        assert [v for _, v in entry.top] == pytest.approx([expected[row, t].item() for t in order], abs=1e-5)


def test_more_log_probabilities_than_tokens() -> None:
    sampler = Sampler(1, 3, "cpu", salt=0)
    sampler.assign(0, params(logprobs=20), "a", ())
    made = sample_all(sampler, logits(1, vocab=3), [0])
    (entry,) = token_logprobs(made.tokens[:, 0].tolist(), made.logprob_rows, made.logprobs)
    assert entry is not None
    assert len(entry.top) == 3


def test_impossible_tokens_are_not_sampled() -> None:
    row = torch.full([VOCAB], -math.inf)
    row[[3, 9]] = 0.0
    for p in (params(), params(top_k=5), params(top_p=0.999), params(min_p=0.01)):
        assert set(samples(row, p, 200).tolist()) == {3, 9}


def test_a_salt_of_64_bits_signed() -> None:
    for salt in (-(2**63), 2**63 - 1):
        Sampler(1, 4, "cpu", salt).assign(0, params(), "a", ())
    with pytest.raises(struct.error):
        Sampler(1, 4, "cpu", 2**63).assign(0, params(), "a", ())


# -- on a GPU ---------------------------------------------------------------------------------------------------------


def test_a_vocabulary_too_large_for_the_kernels_is_refused() -> None:
    Sampler(1, MAX_VOCAB, "cpu", salt=0, kernels=True)
    with pytest.raises(ConfigError, match="may have 262144 tokens; this one has 262145"):
        Sampler(1, MAX_VOCAB + 1, "cpu", salt=0, kernels=True)
    Sampler(1, MAX_VOCAB + 1, "cpu", salt=0)


GPU_VOCAB = 128_256


def everything(count: int) -> list[SamplingParams]:
    kinds = [p for p in SETTINGS if p.top_k < VOCAB] + [params(temperature=0, top_k=4), params(top_k=50, top_p=0.95)]
    kinds += [params(allowed_token_ids=range(0, GPU_VOCAB, 3), top_p=0.9), params(logit_bias={7: 9.0, 8: -3.0})]
    kinds += [params(temperature=0, allowed_token_ids=[5, GPU_VOCAB - 1], logit_bias={5: 2.5}, presence_penalty=0.5)]
    kinds += [params(temperature=0.6, top_k=40), params(top_k=GPU_VOCAB // 2), params(temperature=1e4, top_p=0.5)]
    return [kinds[number % len(kinds)] for number in range(count)]


def gpu_logits(kind: str, rows: int, step: int) -> torch.Tensor:
    x = logits(rows, GPU_VOCAB, seed=step, scale={"flat": 0.5, "equal": 0.0}.get(kind, 3.0))
    return x.bfloat16().float() if kind == "bfloat16" else x


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["steep", "bfloat16", "flat", "equal"])
@pytest.mark.parametrize("count", [1, 3, 20])
def test_a_gpu_samples_the_same_and_the_host_never_waits(count: int, kind: str) -> None:
    kinds = everything(count)
    cpu, gpu = Sampler(count, GPU_VOCAB, "cpu", salt=3), Sampler(count, GPU_VOCAB, "cuda", salt=3)
    gpu.warm_up()
    for slot, p in enumerate(kinds):
        cpu.assign(slot, p, f"{slot}", (1, 2, 3))
    given = [gpu_logits(kind, count, step).pin_memory() for step in range(3)]
    last_tokens = torch.full([count + 1], -1, device="cuda")
    runs = []
    # At the first call PyTorch loads kernels, which waits for the device.
    for mode in ("default", "error", "error"):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode(mode)
        try:
            for slot, p in enumerate(kinds):
                gpu.assign(slot, p, f"{slot}", (1, 2, 3))
            made = []
            for host in given:
                x = host.to("cuda", non_blocking=True)
                tokens = gpu.sample(x, range(count), best_of(x), last_tokens, False).tokens
                made.append((tokens, last_tokens.clone()))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        runs.append([tokens[:, 0].tolist() for tokens, _ in made])
        for tokens, entered in made:
            assert entered.tolist() == [*tokens[:, 0].tolist(), -1]
            assert tokens[:, 1].tolist() == [1] * count
    assert runs[0] == runs[1] == runs[2]
    for host, found in zip(given, runs[0], strict=True):
        assert found == tokens_of(cpu, host, range(count)).tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 8, 64])
def test_times_of_sampling_on_a_gpu(count: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Print the times for rows like those of models, and flat ones. More than a millisecond would be a regression."""
    kinds = {
        "temperature": params(temperature=0.8),
        "top_p": params(temperature=0.8, top_p=0.9),
        "top_k": params(temperature=0.8, top_k=50),
        "top_k and top_p": params(temperature=0.8, top_k=50, top_p=0.9),
        "penalties and top_p": params(top_p=0.9, presence_penalty=0.5),
    }
    for (name, p), kind in itertools.product(kinds.items(), ("bfloat16", "flat")):
        sampler = Sampler(count, GPU_VOCAB, "cuda", salt=3)
        for slot in range(count):
            sampler.assign(slot, p, f"{slot}", (1, 2, 3))
        x = gpu_logits(kind, count, 0).cuda()
        best, last_tokens = best_of(x), torch.zeros(count, dtype=torch.int64, device="cuda")
        device_us, host_us = [], []
        for _ in range(30):
            torch.cuda.synchronize()
            torch.cuda._sleep(1_000_000)  # the device runs behind the host, as in a step
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            started = time.perf_counter()
            begin.record()
            sampler.sample(x, range(count), best, last_tokens, False)
            end.record()
            host_us.append((time.perf_counter() - started) * 1e6)
            end.synchronize()
            device_us.append(begin.elapsed_time(end) * 1e3)
        device, host = statistics.median(device_us), statistics.median(host_us)
        with capsys.disabled():
            print(f"\n{count} rows, {name}, {kind}: {device:.0f} us on the device, {host:.0f} us of the host", end="")
        assert device < 1000
