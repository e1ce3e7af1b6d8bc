"""Ranks of test_sampling.py: sampling by the kernels under the interpreter, compared with PyTorch on the CPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shotcast.engine.sampler import Sampler, noise_key
from shotcast.engine.sampling_params import SamplingParams
from shotcast.engine.torch_sampling import exponential, inverse_temperature, scramble
from shotcast.kernels.triton import sampling
from shotcast.kernels.triton.sampling_scores import key_value, noise, score_bound, score_key

CLOSE = 1e-5
"""The largest relative difference of scores that rounding may order otherwise."""


def best_of(logits: torch.Tensor) -> torch.Tensor:
    best = logits.argmax(1)
    return torch.stack((best, logits.gather(1, best[:, None])[:, 0].isfinite().long()), dim=1)


def sample_tokens(sampler: Sampler, logits: torch.Tensor, slots: Sequence[int]) -> list[int]:
    """Sample, and return the tokens, which are the ones written to ``last_tokens``; nothing else is written."""
    best, drawn = best_of(logits), torch.full([max(slots) + 2], -1)
    before = logits.clone(), best.clone()
    told = sampler.sample(logits, slots, best, drawn, False).tokens
    assert drawn[list(slots)].equal(told[:, 0])
    assert int((drawn == -1).sum()) == len(drawn) - len(slots)
    assert told[:, 1].equal(best[:, 1])
    assert torch.equal(logits.nan_to_num(7.0), before[0].nan_to_num(7.0))
    assert best.equal(before[1])
    assert bool(((told[:, 0] >= 0) & (told[:, 0] < logits.shape[1])).all())
    return told[:, 0].tolist()


def divide(vocab: int, tile: int, capacity: int, num_sms: int) -> None:
    """Set how rows are divided among programs, and how many elements a list holds. Four blocks are at least a row."""
    sampling.TILE, sampling.CAPACITY = tile, capacity
    sampling.BLOCK = 1 << max(0, (vocab // 4).bit_length() - 1)
    sampling.num_sms = lambda device: num_sms


@dataclass(frozen=True)
class Row:
    params: SamplingParams
    output: tuple[int, ...]
    prompt: tuple[int, ...] = ()
    end_tokens: tuple[int, ...] = ()


@dataclass(frozen=True)
class Case:
    """The rows of one batch; ``kind`` is the distribution of their logits."""

    vocab: int
    kind: str
    seed: int
    rows: tuple[Row, ...]
    tile: int
    capacity: int
    num_sms: int

    def logits(self, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed + step)
        x = torch.randn(len(self.rows), self.vocab, generator=generator)
        some = torch.rand(x.shape, generator=generator) < 0.5
        match self.kind:
            case "flat":
                return x * 0.01
            case "steep":
                return x * 20
            case "equal":
                return torch.full_like(x, -3.0)
            case "few":
                return (x * 2).round() * torch.where(some, 1.0, -1.0)  # zeros of either sign among them
            case "masked":
                x[some] = -math.inf
                x[:, self.vocab // 2] = 1.0
                return x
            case "large":
                return x + 3e4
        return (x * 3).bfloat16().float()


KINDS = ("flat", "steep", "equal", "few", "masked", "large", "bfloat16")


@st.composite
def rows(draw: st.DrawFn, vocab: int) -> Row:
    greedy = draw(st.integers(0, 4)) == 0
    penalised = draw(st.integers(0, 2)) == 0
    constrained = draw(st.integers(0, 2)) == 0
    tokens = st.lists(st.integers(0, vocab - 1), max_size=6)
    some = st.lists(st.integers(0, vocab - 1), min_size=1, max_size=40)
    ends = tuple(draw(tokens)) if constrained and vocab > 6 else ()
    params = SamplingParams(
        temperature=0 if greedy else draw(st.sampled_from([1.0, 0.7, 0.05, 2.5, 1e4, 1e-30])),
        top_k=draw(st.sampled_from([0, 0, 1, 3, vocab // 2, vocab - 1, vocab, 2**40])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.9, 0.99, 0.4, 1e-9, 1 - 2**-53]) | st.floats(0.01, 1)),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.1, 1.0, 1e-6])),
        presence_penalty=draw(st.sampled_from([0.0, 1.5, -0.7])) if penalised else 0.0,
        frequency_penalty=draw(st.sampled_from([0.3, 2.0, -1.1])) if penalised else 0.0,
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3, 0.7, 10.0])) if penalised else 1.0,
        allowed_token_ids=draw(st.none() | some) if constrained and not ends else None,
        logit_bias=draw(st.dictionaries(st.integers(0, vocab - 1), st.floats(-9, 9), max_size=5))
        if constrained
        else {},
        min_tokens=draw(st.integers(0, 7)) if ends else 0,
        seed=draw(st.none() | st.integers(0, 9)),
    )
    return Row(params, tuple(draw(tokens)), tuple(draw(tokens)), ends)


@st.composite
def cases(draw: st.DrawFn, vocabs: Sequence[int]) -> Case:
    vocab = draw(st.sampled_from(vocabs))
    tile = draw(st.sampled_from([tile for tile in (16, 64, 1024) if vocab <= 20 * tile]))
    some = tuple(draw(st.lists(rows(vocab), min_size=1, max_size=4)))
    kind, seed = draw(st.sampled_from(KINDS)), draw(st.integers(0, 99))
    capacity, num_sms = draw(st.sampled_from([4, 64, 8192])), draw(st.integers(1, 4))
    return Case(vocab, kind, seed, some, tile, capacity, num_sms)


def samplers(case: Case, nudge: float = 0.0) -> tuple[Sampler, Sampler]:
    """Make samplers by PyTorch and by kernels; ``nudge`` changes top_p relatively."""
    made = tuple(Sampler(len(case.rows) + 3, case.vocab, "cpu", 5, kernels=kernels) for kernels in (False, True))
    for sampler in made:
        for place, row in enumerate(case.rows):
            top_p = min(1.0, row.params.top_p * (1 + nudge)) if row.params.top_p < 1 else 1.0
            request = f"{place}", row.output, row.prompt, row.end_tokens
            sampler.assign(slot_of(place), replace(row.params, top_p=top_p), *request)
    return made[0], made[1]


def slot_of(place: int) -> int:
    return place + 2 if place % 2 else place


def as_good(case: Case, row: Row, place: int, logits: torch.Tensor, tokens: tuple[int, int]) -> bool:
    """Return whether the CPU's own scores of two tokens differ by no more than rounding."""
    params = row.params
    if params.greedy:
        return False
    sampler, _ = samplers(case)
    seed = sampler._seeds[slot_of(place)]
    counts = torch.tensor([row.output.count(token) for token in range(case.vocab)])
    penalty = (counts > 0) * torch.tensor(params.presence_penalty) + counts * torch.tensor(params.frequency_penalty)
    seen = torch.tensor([token in (*row.output, *row.prompt) for token in range(case.vocab)])
    repetition = torch.where(seen, torch.tensor(params.repetition_penalty), 1.0)
    logits = logits.clone()
    for token, bias in params.logit_bias:
        logits[token] += bias
    x = torch.where(logits > 0, logits / repetition, logits * repetition) - penalty
    for token in range(case.vocab):
        banned = token in row.end_tokens and len(row.output) < params.min_tokens
        if banned or (params.allowed_token_ids and token not in params.allowed_token_ids):
            x[token] = -math.inf
    x = (x - x.max()) * inverse_temperature(params)
    key = torch.frombuffer(bytearray(noise_key(seed, len(row.output))), dtype=torch.int32)[None]
    noise = scramble(torch.arange(case.vocab, dtype=torch.int32)[None], torch.zeros(1, 2, dtype=torch.int32))
    scores = x - exponential(scramble(noise, key))[0].log()
    one, other = (float(scores[token]) for token in tokens)
    return abs(one - other) <= CLOSE * max(1.0, abs(one))


def compare(case: Case) -> tuple[int, int]:
    """Return the number of sampled tokens, and how many of them differ within rounding.

    Raises:
        AssertionError: a token differs by more than rounding.
    """
    divide(case.vocab, case.tile, case.capacity, case.num_sms)
    slots = [slot_of(place) for place in range(len(case.rows))]
    plain, kernels = samplers(case)
    outputs = [row.output for row in case.rows]
    total = excused = 0
    for step in range(2):
        logits = case.logits(step)
        wanted, found = sample_tokens(plain, logits, slots), sample_tokens(kernels, logits, slots)
        now = replace(case, rows=tuple(replace(row, output=out) for row, out in zip(case.rows, outputs, strict=True)))
        total += len(slots)
        for place, pair in enumerate(zip(wanted, found, strict=True)):
            if pair[0] == pair[1]:
                continue
            nudged = {sample_tokens(samplers(now, nudge)[0], logits, slots)[place] for nudge in (-1e-6, 1e-6)}
            assert as_good(now, now.rows[place], place, logits[place], pair) or pair[1] in nudged, (now, place, pair)
            excused += 1
        outputs = [(*output, token) for output, token in zip(outputs, found, strict=True)]
        for place, output in enumerate(outputs):  # where they differ, the CPU continues from the kernels' token
            row = case.rows[place]
            plain.assign(slots[place], row.params, f"{place}", output, row.prompt, row.end_tokens)
    return total, excused


def compared(vocabs: Sequence[int], examples: int) -> tuple[int, int]:
    """Run :func:`compare` over this many examples."""
    totals = [0, 0]

    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(cases(vocabs))
    def run(case: Case) -> None:
        for place, amount in enumerate(compare(case)):
            totals[place] += amount

    run()
    return totals[0], totals[1]


def alone_and_together(vocab: int) -> list[tuple[list[int], list[int]]]:
    """Return, for several divisions of the rows among programs, the tokens of requests alone and in a batch."""
    kinds = (
        SamplingParams(seed=1),
        SamplingParams(seed=2, top_k=9, top_p=0.8),
        SamplingParams(seed=3, top_p=0.95, presence_penalty=0.5),
        SamplingParams(temperature=0, frequency_penalty=0.5),
        SamplingParams(seed=4, min_p=0.05),
        SamplingParams(temperature=0),
    )
    x = (torch.randn(len(kinds), vocab, generator=torch.Generator().manual_seed(0)) * 2).bfloat16().float()
    found = []
    for tile, capacity, num_sms in ((64, 8192, 1), (128, 16, 3), (1024, 64, 2)):
        divide(vocab, tile, capacity, num_sms)
        slots = list(range(len(kinds)))[::-1]
        crowd = Sampler(len(kinds), vocab, "cpu", 5, kernels=True)
        for slot, params in zip(slots, kinds, strict=True):
            crowd.assign(slot, params, "", (3, 3, 4))
        alone = []
        for params, row in zip(kinds, x, strict=True):
            sampler = Sampler(1, vocab, "cpu", 5, kernels=True)
            sampler.assign(0, params, "", (3, 3, 4))
            alone += sample_tokens(sampler, row[None], [0])
        found.append((alone, sample_tokens(crowd, x, slots)))
    return found


def broken(vocab: int) -> list[int]:
    """Sample rows whose logits are not numbers, between rows whose logits are."""
    divide(vocab, 64, 16, 2)
    x = torch.randn(7, vocab, generator=torch.Generator().manual_seed(0))
    x[1, 3], x[2, 5], x[3], x[4, 7] = math.nan, math.inf, -math.inf, math.nan
    cut, greedy = SamplingParams(seed=1, top_p=0.9, top_k=20), SamplingParams(temperature=0, presence_penalty=1.0)
    kinds = [cut, cut, cut, cut, greedy, SamplingParams(seed=2), SamplingParams(seed=3, top_k=3)]
    samplers = [Sampler(7, vocab, "cpu", 0, kernels=kernels) for kernels in (True, False)]
    whole = [0, 5, 6]
    for sampler in samplers:
        for slot, params in enumerate(kinds):
            sampler.assign(slot, params, "", ())
    found = sample_tokens(samplers[0], x, range(7))
    return [found[row] for row in whole] + sample_tokens(samplers[1], x[whole], whole)


def warmed(vocab: int) -> bool:
    """Return whether warming up leaves the sampled tokens as they are."""
    params = SamplingParams(seed=1, top_k=5, presence_penalty=1.0)
    x = torch.randn(1, vocab, generator=torch.Generator().manual_seed(0))
    found = []
    for warm in (False, True):
        sampler = Sampler(1, vocab, "cpu", 0, kernels=True)
        if warm:
            sampler.warm_up()
        sampler.assign(0, params, "", (1,))
        found.append([sample_tokens(sampler, x, [0]) for _ in range(3)])
    return found[0] == found[1]


def tail(count: int) -> list[int]:
    """Sample with top_p 0.75 of tokens that weigh 1 and 0.3, and 998 that weigh 0.09 together.

    Each of these is so far off that their weights are added up at once. With them, the first token does not reach
    top_p; without them it would.
    """
    divide(1000, 64, 64, 2)
    x = torch.tensor([1.0, 0.3] + [9e-5] * 998).log()
    sampler = Sampler(count, 1000, "cpu", 0, kernels=True)
    for slot in range(count):
        sampler.assign(slot, SamplingParams(top_p=0.75, seed=slot), "", ())
    return sample_tokens(sampler, x.expand(count, -1).contiguous(), range(count))


@triton.jit
def score_kernel(keys, scores, SIZE: tl.constexpr):  # noqa: N803
    i = tl.arange(0, SIZE)
    pair = tl.load(keys + 2 * i).to(tl.uint32, bitcast=True), tl.load(keys + 2 * i + 1).to(tl.uint32, bitcast=True)
    bits, distance = noise(i * 0, pair), tl.zeros([SIZE], tl.float32)
    tl.store(scores + i, key_value(score_key(distance, i * 0, bits)))
    tl.store(scores + SIZE + i, score_bound(distance, bits))


def scores(bits: list[int]) -> tuple[list[float], list[float], list[float]]:
    """Return the scores of a token at distance 0 whose noise has these bits, by the kernels and by PyTorch; and their
    bounds."""
    keys = []
    # the first, unkeyed hash maps token 0 to 0; the steps of the keyed one are inverted, last step first
    for wanted in bits:
        x = wanted ^ wanted >> 15 ^ wanted >> 30
        keys += [0, x * pow(0xD35A2D97, -1, 2**32) % 2**32]
    made = torch.zeros(2, len(bits))
    key = torch.tensor(keys, dtype=torch.int64).int()
    score_kernel[(1,)](key, made, len(bits))
    noise = scramble(torch.zeros(len(bits), 1, dtype=torch.int32), key.view(-1, 2))
    assert noise[:, 0].tolist() == torch.tensor(bits).int().tolist()
    return made[0].tolist(), (-exponential(noise)[:, 0].log()).tolist(), made[1].tolist()


def zeros() -> list[int]:
    """Sample from zeros of either sign, which are equal: greedily with penalties of other tokens, and by top_k."""
    divide(20, 16, 16, 2)
    x = torch.full([2, 20], -1.0)
    x[:, 3], x[:, 5] = -0.0, 0.0
    kinds = SamplingParams(temperature=0, presence_penalty=1.0), SamplingParams(top_k=1)
    sampler = Sampler(2, 20, "cpu", 0, kernels=True)
    for slot, params in enumerate(kinds):
        sampler.assign(slot, params, "", (0,))
    return sample_tokens(sampler, x, range(2))


def both_cuts() -> tuple[int, int]:
    """Run :func:`compare` where top_p keeps fewer of the tokens that top_k leaves than of all tokens."""
    kinds = [SamplingParams(top_k=k, top_p=p, seed=seed) for k in (5, 500) for p in (0.3, 0.8) for seed in range(4)]
    return compare(Case(1000, "flat", 0, tuple(Row(params, ()) for params in kinds), 128, 8192, 2))
