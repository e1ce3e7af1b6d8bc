"""The engine with a real model on real ranks: SmolLM2-135M, compared with Transformers and with itself."""

from __future__ import annotations

import functools
import itertools
import os
import queue
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from shotcast.engine.client import RequestUpdate
from shotcast.engine.llm import LLM
from shotcast.engine.outputs import EngineCoreOutput, RequestOutput
from shotcast.engine.sampling_params import SamplingParams
from shotcast.engine.tokenizer import Tokenizer
from shotcast.errors import ConfigError, EngineDead, UnsupportedError
from shotcast.launcher.spawn import RankGroup
from shotcast.models.source import find_model

pytestmark = [pytest.mark.long, pytest.mark.timing]

PROMPTS = [
    "The capital of France is",
    "1, 2, 3, 4,",
    "Once upon a time there was a little robot who",
    "def fibonacci(n):",
    "Water boils at",
    "The opposite of hot is",
    "In 1969, two people walked on the Moon. They were",
    "To make tea, first",
    "A list of fruits: apple, banana,",
    "The quick brown fox",
    "Roses are red,",
    "The largest planet of the solar system",
    "Dear Sir or Madam,",
    "Photosynthesis is the process by which",
    "Q: What is 2 + 2?\nA:",
    "The Pythagorean theorem says that",
    "My favourite season is autumn because",
    "Monday, Tuesday, Wednesday,",
    "She opened the door and saw",
    "Ein Satz auf Deutsch:",
]
PROMPT_LOGPROB_TOLERANCE = 1e-4
"""Log-probabilities of a small model in float32 differ by as much, with the order of summation."""
CLOSE = 1e-4
"""Logits as close as this, relative to the largest, may change order with the order of summation."""


@pytest.fixture(scope="module", autouse=True)
def one_tokenizer() -> Iterator[None]:
    """The tokenizer that the engines of these tests share: transformers takes four seconds to read a vocabulary."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tokenizer, "load", functools.cache(Tokenizer.load))
        yield


@pytest.fixture(scope="module")
def reference() -> Any:
    """The same file, read by Transformers."""
    from transformers import AutoModelForCausalLM

    path = find_model("smollm2")
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    return model.eval()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a model of two small layers, for what depends on no model: its engines start in a second."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny(folder)
    return str(folder)


@pytest.fixture(scope="module")
def tiny_reference(tiny: str) -> Any:
    return transformers.LlamaForCausalLM.from_pretrained(tiny).eval()


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("smollm2", tensor_parallel=2, max_model_len=1024, max_num_seqs=32) as llm:
        yield llm


def greedy(length: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, **options)


@torch.inference_mode()
def assert_greedy(reference: Any, outputs: Sequence[RequestOutput], ties: int = 2) -> None:
    """Check that each output equals that of Transformers; where it first differs, the two best logits must be close."""
    parted = 0
    for output in outputs:
        known = torch.tensor([*output.prompt_tokens, *output.tokens])
        logits = reference(known[None, :-1]).logits[0, len(output.prompt_tokens) - 1 :]
        best = logits.argmax(-1)
        wrong = (best != torch.tensor(output.tokens)).nonzero()
        if len(wrong):
            parted += 1
            place = int(wrong[0])
            row = logits[place]
            assert row.max() - row[output.tokens[place]] <= CLOSE * row.abs().max(), (output.text, place)
    assert parted <= ties, f"{parted} of {len(outputs)} outputs part from the reference"


@pytest.mark.full
@pytest.mark.parametrize("length", [12, pytest.param(64, marks=pytest.mark.full)])
def test_greedy_outputs_are_those_of_transformers(llm: LLM, reference: Any, length: int) -> None:
    outputs = llm.generate(PROMPTS, greedy(length))
    assert [len(output.tokens) for output in outputs] == [length] * len(PROMPTS)
    assert_greedy(reference, outputs)
    assert outputs[0].text.startswith(" Paris")
    assert outputs[1].text.startswith(" 5, 6, 7")


@pytest.mark.parametrize(
    ("tensor", "stages"),
    [pytest.param(*layout, marks=pytest.mark.full) for layout in ((1, 1), (1, 2), (3, 1), (2, 2))],
)
def test_outputs_do_not_depend_on_the_layout(reference: Any, tensor: int, stages: int) -> None:
    with LLM("smollm2", tensor_parallel=tensor, pipeline_parallel=stages, max_model_len=256) as llm:
        assert_greedy(reference, llm.generate(PROMPTS[:8], greedy(16)))


def test_an_answer(llm: LLM) -> None:
    output = llm.chat([{"role": "user", "content": "What is the capital of France?"}], greedy(40))
    assert "Paris" in output.text
    ended = llm.chat([{"role": "user", "content": "Say hello."}], SamplingParams(temperature=0.0, max_tokens=100))
    assert ended.finish_reason == "stop"
    assert ended.stop_reason is None
    assert ended.tokens[-1] in llm.model.eos
    assert "<|im_end|>" not in ended.text


def test_text_and_times_grow(llm: LLM) -> None:
    seen = list(llm.stream(PROMPTS[2], greedy(20)))
    assert "".join(output.delta for output in seen) == seen[-1].text
    assert all(later.text.startswith(earlier.text) for earlier, later in itertools.pairwise(seen))
    assert len(seen) > 10, "tokens came together, not one by one"
    last = seen[-1]
    assert last.tpot_s is not None
    assert 0 < last.ttft_s < last.time_s
    assert last.tpot_s == pytest.approx((last.time_s - last.ttft_s) / 19)
    assert len(last.times_s) == 20
    assert list(last.times_s) == sorted(last.times_s)


def test_stop_strings_and_tokens(llm: LLM) -> None:
    whole = llm.generate(PROMPTS[1], greedy(20))[0]
    cut = llm.generate(PROMPTS[1], greedy(20, stop=("8", "no such text")))[0]
    assert cut.text == whole.text[: whole.text.index("8")]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", "8")
    token = whole.tokens[5]
    by_token = llm.generate(PROMPTS[1], greedy(20, stop_token_ids=(token,)))[0]
    assert by_token.tokens == whole.tokens[: whole.tokens.index(token) + 1]
    assert (by_token.finish_reason, by_token.stop_reason) == ("stop", token)


@pytest.mark.full
def test_logprobs_are_those_of_transformers(llm: LLM, reference: Any) -> None:
    output = llm.generate(PROMPTS[0], SamplingParams(temperature=1.0, seed=1, max_tokens=8, logprobs=3))[0]
    assert output.logprobs is not None
    known = torch.tensor([*output.prompt_tokens, *output.tokens])
    with torch.inference_mode():
        wanted = reference(known[None, :-1]).logits[0, len(output.prompt_tokens) - 1 :].log_softmax(-1)
    assert len(output.logprobs) == len(output.tokens)
    for position, entry in enumerate(output.logprobs):
        assert entry.token == output.tokens[position]
        assert entry.logprob == pytest.approx(wanted[position, entry.token].item(), abs=1e-3)
        best = wanted[position].topk(3)
        assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-3)


@pytest.mark.full
def test_a_seed_gives_the_same_output_in_any_batch(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=7, max_tokens=12)
    alone = llm.generate(PROMPTS[3], params)[0]
    others = [SamplingParams(temperature=1.0, max_tokens=12) for _ in range(6)]
    among = llm.generate([*PROMPTS[4:7], PROMPTS[3], *PROMPTS[7:10]], [*others[:3], params, *others[3:]])
    assert among[3].tokens == alone.tokens
    seeds = [SamplingParams(temperature=1.0, top_p=0.9, seed=seed, max_tokens=12) for seed in range(8)]
    assert len({tuple(output.tokens) for output in llm.generate([PROMPTS[3]] * 8, seeds)}) > 1


@pytest.mark.full
def test_prefixes_are_reused(llm: LLM, reference: Any) -> None:
    prefix = "You are given a long text that many requests begin with. " * 6
    first = llm.generate(prefix + "First question:", greedy(8))[0]
    second = llm.generate(prefix + "Second question:", greedy(8))[0]
    assert first.cached_tokens == 0
    assert second.cached_tokens > 48
    assert second.cached_tokens < len(second.prompt_tokens)
    assert_greedy(reference, [first, second])


def test_a_closed_stream_ends_the_request(llm: LLM) -> None:
    stream = llm.stream(PROMPTS[2], greedy(900))
    next(stream)
    assert llm.stats().running == 1
    stream.close()
    llm.generate(PROMPTS[0], greedy(4))
    assert llm.stats().running == 0
    assert llm.stats().kv_blocks_used == 0


def test_bad_prompts_are_refused_and_leave_nothing_behind(llm: LLM) -> None:
    for prompt, message in (([[]], "empty"), ([1, 99999], "99999"), ([-1], "-1"), ([5] * 1024, "1024 tokens")):
        with pytest.raises(ConfigError, match=message):
            llm.generate(prompt, greedy(2))
    for nothing in (5, [[True]], [[1.5]], [["a"]], torch.tensor([1.0])):
        with pytest.raises(ConfigError, match=r"the prompt (must hold|holds)"):
            llm.generate(nothing, greedy(2))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="2 prompts and 3 params"):
        llm.generate(PROMPTS[:2], [greedy(1)] * 3)
    for other in ({"max_tokens": 1}, [greedy(1), "greedy"]):
        with pytest.raises(ConfigError, match="params must be SamplingParams"):
            llm.generate(PROMPTS[:2], other)  # type: ignore[arg-type]
    assert llm.generate(PROMPTS[0], greedy(2))[0].text


@pytest.mark.full
def test_token_ids_of_any_integer_type(llm: LLM) -> None:
    tokens = [5, 6, 7]
    expected = llm.generate(tokens, greedy(3))[0]
    given: list[Any] = [
        np.array(tokens),
        list(np.array(tokens, dtype=np.uint16)),
        [np.array(tokens)],
        torch.tensor(tokens),
        torch.tensor([tokens]),
        (prompt for prompt in [tokens]),
    ]
    for prompts in given:
        (output,) = llm.generate(prompts, greedy(3))
        assert output.tokens == expected.tokens
        assert output.prompt_tokens == (5, 6, 7)
        assert {type(token) for token in output.prompt_tokens} == {int}


def test_little_memory_changes_no_output(tiny: str, tiny_reference: Any) -> None:
    """The cache has room for a fraction of the sequences, so they lose their blocks and are computed again."""
    one_token = 2 * 2 * 4 * 8 * 4
    with LLM(tiny, max_model_len=112, kv_cache_bytes=one_token * 160, prefix_caching=False) as llm:
        outputs = llm.generate([list(range(first, first + 8)) for first in range(6)], greedy(40))
        assert llm.stats().preemptions > 0
        assert_greedy(tiny_reference, outputs)


def test_prompts_longer_than_a_step_run_in_chunks(tiny: str, tiny_reference: Any) -> None:
    prompt = [number * number % 64 for number in range(150)]
    with LLM(tiny, max_model_len=512, max_num_batched_tokens=40, max_num_seqs=4) as llm:
        outputs = llm.generate([prompt, prompt[:5]], greedy(8))
        assert llm.stats().steps > len(outputs[0].prompt_tokens) // 40
        assert_greedy(tiny_reference, outputs)


@pytest.mark.parametrize(("tensor", "stages"), [(1, 1), (2, 1), pytest.param(1, 2, marks=pytest.mark.full)])
def test_speculation_changes_no_output(tiny: str, tiny_reference: Any, tensor: int, stages: int) -> None:
    prompts = [[first, 7, 9, first + 1] * 5 for first in range(5)]
    params = [
        greedy(60),
        greedy(60, logprobs=1),
        SamplingParams(temperature=0.3, seed=3, max_tokens=60, ignore_eos=True),
        SamplingParams(top_p=0.6, seed=4, max_tokens=60, ignore_eos=True, presence_penalty=-1.0),
        SamplingParams(min_p=0.3, seed=5, max_tokens=60, ignore_eos=True, logit_bias={9: 4.0}),
    ]
    ngram = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    layout = {"tensor_parallel": tensor, "pipeline_parallel": stages, "max_model_len": 112}
    with LLM(tiny, **layout) as llm:
        plain = llm.generate(prompts, params)
        assert llm.stats().proposed_tokens == 0
    with LLM(tiny, speculative_config=ngram, **layout) as llm:
        found = llm.generate(prompts, params)
        stats = llm.stats()
    assert stats.proposed_tokens > stats.accepted_tokens > 20
    assert [output.tokens for output in found] == [output.tokens for output in plain]
    assert_greedy(tiny_reference, found[:2])
    for one, other in zip(found[1].logprobs or (), plain[1].logprobs or (), strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


@pytest.mark.parametrize(("tensor", "stages"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.full)])
def test_a_draft_model_proposes_what_the_model_samples(
    tiny: str, tiny_reference: Any, tensor: int, stages: int
) -> None:
    """It is the model itself here, so nearly all of its proposals are accepted."""
    draft = {"model": tiny, "num_speculative_tokens": 3}
    layout = {"tensor_parallel": tensor, "pipeline_parallel": stages, "max_model_len": 112}
    with LLM(tiny, speculative_config=draft, **layout) as llm:
        prompts = [[first, 7, 9, first + 1] * 5 for first in range(3)]
        found = llm.generate(prompts, [greedy(40), greedy(60), SamplingParams(seed=1, max_tokens=30, ignore_eos=True)])
        stats = llm.stats()
    assert_greedy(tiny_reference, found[:2])
    assert stats.accepted_tokens > 0.9 * stats.proposed_tokens > 20


@torch.inference_mode()
def assert_prompt_logprobs(reference: Any, output: RequestOutput, alternatives: int) -> None:
    """Check the log-probabilities of a prompt in float32 against those of Transformers."""
    assert output.prompt_logprobs is not None
    first, *entries = output.prompt_logprobs
    assert first is None
    assert [entry.token for entry in entries if entry] == list(output.prompt_tokens[1:])
    expected = reference(torch.tensor([output.prompt_tokens])).logits[0].log_softmax(-1)
    for entry, row in zip(entries, expected, strict=False):
        assert entry is not None
        assert entry.logprob == pytest.approx(row[entry.token].item(), abs=PROMPT_LOGPROB_TOLERANCE)
        assert abs(entry.rank - 1 - int((row > row[entry.token]).sum())) <= 1
        assert len(entry.top) == alternatives
        best = [value for _, value in entry.top]
        assert best == pytest.approx(row.topk(alternatives).values.tolist(), abs=PROMPT_LOGPROB_TOLERANCE)
        assert best == pytest.approx([row[token].item() for token, _ in entry.top], abs=PROMPT_LOGPROB_TOLERANCE)


@pytest.mark.parametrize(("tensor", "stages"), [(1, 1), (2, 1), (1, 2), pytest.param(2, 2, marks=pytest.mark.full)])
def test_prompt_logprobs_are_those_of_transformers(tiny: str, tiny_reference: Any, tensor: int, stages: int) -> None:
    """Prompts in chunks, of which the last may be one token, known to the cache, of one token, and beside others."""
    long = [number * number % 64 for number in range(150)]
    prompts = [long, long[:121], [5], [6, 7], long]
    layout = {"tensor_parallel": tensor, "pipeline_parallel": stages}
    with LLM(tiny, max_model_len=512, max_num_batched_tokens=40, max_num_seqs=4, **layout) as llm:
        (plain,) = llm.generate([long], greedy(4))
        for alternatives, length in ((3, 0), (0, 4)):
            outputs = llm.generate(prompts, greedy(length, prompt_logprobs=alternatives))
            for output in outputs:
                assert_prompt_logprobs(tiny_reference, output, alternatives)
                assert (len(output.tokens), output.finish_reason, output.cached_tokens) == (length, "length", 0)
        assert_greedy(tiny_reference, outputs)
        (cached,) = llm.generate([long], greedy(4))
        assert cached.cached_tokens > 0
        assert plain.prompt_logprobs is cached.prompt_logprobs is None
        assert llm.stats().output_tokens == 4 * (2 + len(prompts))


def test_prompt_logprobs_survive_preemption(tiny: str, tiny_reference: Any) -> None:
    prompts = [[number * (number + shift) % 64 for number in range(48)] for shift in range(6)]
    kv_cache_bytes = 160 * 2 * 2 * 32 * 4  # 160 tokens, of two layers
    with LLM(tiny, max_model_len=128, max_num_batched_tokens=20, max_num_seqs=4, kv_cache_bytes=kv_cache_bytes) as llm:
        outputs = llm.generate(prompts, greedy(40, prompt_logprobs=2))
        assert llm.stats().preemptions > 0
    for output in outputs:
        assert_prompt_logprobs(tiny_reference, output, 2)
    assert_greedy(tiny_reference, outputs)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (signal.SIGKILL, "killed by SIGKILL"),
        pytest.param(signal.SIGTERM, "SIGTERM", marks=pytest.mark.full),
    ],
)
def test_a_killed_rank_fails_running_requests_at_once(tiny: str, how: signal.Signals, message: str) -> None:
    with LLM(tiny, tensor_parallel=2) as llm:
        pids = llm.pids
        stream = llm.stream([1, 2, 3], greedy(1900))
        next(stream)
        os.kill(pids[1], how)
        started = time.monotonic()
        with pytest.raises(EngineDead, match=message):
            list(stream)
        assert time.monotonic() - started < 60
        assert repr(llm) == f"LLM({tiny!r}, layout=2x1, device=cpu, dead)"
        with pytest.raises(EngineDead, match=message):
            llm.generate([5], greedy(2))
    assert_gone(pids)


@pytest.mark.full
def test_a_stopped_rank_is_named_within_the_timeout(tiny: str) -> None:
    with LLM(tiny, tensor_parallel=2, timeout_s=2.0) as llm:
        pids = llm.pids
        stream = llm.stream([1, 2, 3], greedy(1900))
        next(stream)
        os.kill(pids[1], signal.SIGSTOP)
        started = time.monotonic()
        with pytest.raises(EngineDead, match="missing ranks: 1"):
            list(stream)
        assert time.monotonic() - started < 60
    assert_gone(pids)


def test_close_ends_the_ranks_and_waiting_requests(tiny: str) -> None:
    llm = LLM(tiny)
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            list(llm.stream([1, 2, 3], greedy(1900)))
        except EngineDead as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    while llm.stats().running == 0:
        time.sleep(0.01)
    assert repr(llm) == f"LLM({tiny!r}, layout=1x1, device=cpu, running)"
    llm.close()
    llm.close()
    assert repr(llm) == f"LLM({tiny!r}, layout=1x1, device=cpu, closed)"
    thread.join(100)
    assert not thread.is_alive()
    assert "closed" in str(errors[0])
    assert_gone(llm.pids)
    with pytest.raises(EngineDead, match="closed"):
        llm.generate([5], greedy(2))


def test_close_with_a_step_in_each_stage_is_no_death(tiny: str) -> None:
    llm = LLM(tiny, pipeline_parallel=2)
    streams = [llm.stream(prompt, greedy(1900)) for prompt in ([1, 2], [3])]
    for stream in streams:
        next(stream)
    llm.close()
    for stream in streams:
        with pytest.raises(EngineDead, match="closed"):
            list(stream)
    assert llm.dead is None
    assert_gone(llm.pids)


@pytest.mark.full
def test_a_stopped_rank_0_blocks_nobody_and_gives_no_sign_of_life(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    with LLM(str(tmp_path), timeout_s=2.0) as llm:
        os.kill(llm.pids[0], signal.SIGSTOP)
        started = time.monotonic()
        steps: queue.SimpleQueue[list[RequestUpdate]] = queue.SimpleQueue()
        for number in range(400):  # far more than fit into a pipe
            llm._send(str(number), (1,) * 2000, greedy(2), steps.put)
        assert time.monotonic() - started < 2
        for _ in range(400):
            ((_, error, _),) = steps.get(timeout=15)
            assert isinstance(error, EngineDead)
            assert "no sign of life" in str(error)


@pytest.mark.full
@pytest.mark.parametrize(
    ("end", "status"),
    [pytest.param("raise SystemExit(7)", 7, marks=pytest.mark.full), ("os.kill(os.getpid(), 9)", -9)],
)
def test_a_script_that_does_not_close_the_engine_still_ends(tmp_path: Path, end: str, status: int) -> None:
    save_tiny(tmp_path)
    script = tmp_path / "script.py"
    script.write_text(
        "import os\n"
        "from shotcast.engine.llm import LLM\n"
        "if __name__ == '__main__':\n"
        f"    llm, other = LLM({str(tmp_path)!r}), LLM({str(tmp_path)!r})\n"
        "    print(*llm.pids, *other.pids, flush=True)\n"
        f"    {end}\n"
    )
    assert_gone([int(pid) for pid in run(script, status).split()])


@pytest.mark.full
def test_a_forked_process_ends_without_the_engine(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing\n"
        "from shotcast.engine.llm import LLM\n"
        "if __name__ == '__main__':\n"
        f"    llm = LLM({str(tmp_path)!r})\n"
        "    other = multiprocessing.get_context('fork').Process(target=llm.close)\n"
        "    other.start()\n"
        "    other.join()\n"
        "    assert other.exitcode == 0\n"
        "    print(len(llm.generate([[5]])), flush=True)\n"
        "    llm.close()\n"
    )
    assert run(script) == "1\n"


def run(script: Path, status: int = 0) -> str:
    """Run a script that writes nothing to stderr and leaves no temporary file, and return its output."""
    with tempfile.TemporaryDirectory() as folder:  # the path of pytest's folder is too long for sockets
        result = subprocess.run(
            [sys.executable, str(script)],
            capture_output=True,
            text=True,
            timeout=300,
            env=os.environ | {"TMPDIR": folder},
        )
        assert (result.returncode, result.stderr) == (status, "")
        assert [name for name in os.listdir(folder) if name.startswith("shotcast-")] == []
    return result.stdout


@pytest.mark.full
def test_a_callback_is_called_once_per_step_for_all_its_requests(llm: LLM) -> None:
    steps: queue.SimpleQueue[list[RequestUpdate]] = queue.SimpleQueue()
    for number in range(4):
        llm._send(f"shared-{number}", (number + 5,), greedy(40), steps.put)
    tokens: dict[str, int] = dict.fromkeys((f"shared-{number}" for number in range(4)), 0)
    together = 0
    while set(tokens.values()) != {40}:
        updates = steps.get(timeout=100)
        together = max(together, len(updates))
        assert len({update.request_id for update in updates}) == len(updates)
        for name, result, _ in updates:
            assert isinstance(result, EngineCoreOutput)
            tokens[name] += len(result.tokens)
            assert (result.finish_reason is not None) == (tokens[name] == 40)
    assert together == 4


def test_a_bad_prompt_ends_the_requests_before_it(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="empty"):
        llm.generate([PROMPTS[2], []], greedy(900))
    llm.generate(PROMPTS[0], greedy(2))
    assert llm.stats().running == 0


@pytest.mark.full
def test_a_stop_string_ends_its_own_request_while_others_run(llm: LLM) -> None:
    before = llm.stats().output_tokens
    params = [greedy(40), *[greedy(900, stop=(",",))] * 3]
    outputs = llm.generate([PROMPTS[2], *[PROMPTS[1]] * 3], params)
    assert [output.stop_reason for output in outputs[1:]] == [","] * 3
    llm.generate(PROMPTS[0], greedy(1))
    assert llm.stats().output_tokens - before < 100


def assert_gone(pids: list[int]) -> None:
    until = time.monotonic() + 100
    while (left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]) and time.monotonic() < until:
        time.sleep(0.05)
    assert not left


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "no-such-model"}, "there is no model 'no-such-model'; accepted"),
        ({"model": "smolm2"}, r"there is no model 'smolm2' \(did you mean smollm2\?\)"),
        ({"tensor_paralel": 2}, r"no option 'tensor_paralel'; did you mean tensor_parallel\?"),
        ({"temperature": 0}, r"no option 'temperature'; accepted: .*, dtype, "),
        ({"dtype": "float64"}, "dtype must be one of float32, bfloat16, float16, not 'float64'"),
        ({"dtype": "float16", "device": "cpu"}, "dtype on cpu must be one of float32"),
        ({"quantization": "int4"}, 'quantization must be "" .none. or fp8'),
        ({"quantization": "fp8", "device": "cpu"}, "fp8 works on CUDA with bfloat16, not on cpu"),
        ({"quantization": "fp8", "device": "cuda", "dtype": "float16"}, "not on cuda with float16"),
        ({"kv_cache_dtype": "int8"}, 'kv_cache_dtype must be "" .that of activations. or fp8'),
        ({"kv_cache_dtype": "fp8", "device": "cpu"}, "fp8 works on CUDA with 16-bit types, not on cpu"),
        ({"kv_cache_dtype": "fp8", "device": "cuda", "dtype": "float32"}, "not on cuda with float32"),
        ({"device": "tpu"}, "device must be one of auto, cpu, cuda, not 'tpu'"),
        ({"stamp_every": -1}, "stamp_every must be a whole number"),
        ({"max_num_seqs": 0}, "max_num_seqs must be a whole number"),
        ({"max_num_batched_tokens": 8, "max_num_seqs": 9}, "max_num_batched_tokens"),
        ({"algorithm": "fastest"}, "algorithm must be one of"),
        ({"max_model_len": 1}, "max_model_len must be 0 .* or at least 2, not 1"),
        ({"seed": 2**64}, "seed must be None or"),
        ({"seed": True}, "seed must be None or"),
        ({"memory_fraction": "half"}, "memory_fraction must be a number"),
        ({"memory_fraction": True}, "memory_fraction must be a number"),
        ({"gpu_memory_utilization": 1.1}, "gpu_memory_utilization must be a number"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"model": None}, "model must be a name or a path, not None"),
        ({"model": Path("/no/model")}, "there is no model '/no/model'"),
        ({"device": []}, r"device must be a string, not \[\]"),
        ({"dtype": None}, "dtype must be a string, not None"),
        ({"prefix_caching": "no"}, "prefix_caching must be True or False, not 'no'"),
        ({"tensor_parallel": 2**40}, "tensor_parallel must be a whole number from 1 to 1024"),
        ({"tensor_parallel": 33, "pipeline_parallel": 32}, "tensor_parallel x pipeline_parallel is 1056, above 1024"),
        ({"block_size": 2**31}, "block_size must be a whole number from 1 to 1024"),
        ({"max_model_len": 9000}, "the model was made for at most 8192 tokens"),
        ({"pipeline_parallel": 31}, "30 layers cannot be divided between 31 stages"),
    ],
)
def test_invalid_options_are_refused(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str) -> None:
    def start(*_: object) -> None:
        pytest.fail("processes were started for it")

    monkeypatch.setattr(RankGroup, "start", start)
    with pytest.raises(ConfigError, match=message):
        LLM(**{"model": "smollm2", **options})


def save_tiny(folder: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


@pytest.mark.parametrize("model", ["tiny", pytest.param("smollm2", marks=pytest.mark.full)])
def test_the_process_of_the_user_needs_no_pytorch(tiny: str, model: str) -> None:
    """Which would take it seconds to import, and more than 100 MB."""
    code = f"""
        import sys
        from shotcast import LLM, SamplingParams

        if __name__ == "__main__":
            with LLM({tiny if model == "tiny" else model!r}, device="cpu", max_model_len=64) as llm:
                (output,) = llm.generate([[1, 2]], SamplingParams(max_tokens=3, ignore_eos=True))
                print(len(output.tokens), "torch" in sys.modules)
    """
    ran = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=300)
    assert ran.stdout.strip() == "3 False", ran.stderr


def test_invalid_logits_fail_only_their_request(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    torch.manual_seed(0)  # so that the good requests do not sample the token whose embedding is invalid
    model = transformers.LlamaForCausalLM(config)
    model.model.embed_tokens.weight.data[7] = float("nan")
    model.save_pretrained(tmp_path)
    with LLM(str(tmp_path), tensor_parallel=2, max_model_len=64) as llm:
        good, bad, other = llm.generate([[1, 2], [1, 7], [3]], greedy(4))
        assert (bad.tokens, bad.finish_reason) == ([], "error")
        assert "not numbers" in bad.error
        for output in (good, other):
            assert (output.error, len(output.tokens), output.finish_reason) == ("", 4, "length")
            assert 7 not in output.tokens
        (last,) = llm.stream([5, 7], greedy(4))
        assert last.finish_reason == "error"


def test_unsupported_models_are_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace("LlamaForCausalLM", "MambaForCausalLM"))
    with pytest.raises(UnsupportedError, match="MambaForCausalLM"):
        LLM(str(tmp_path))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel": 65}, "64 words"),
        ({"pipeline_parallel": 3}, "2 layers"),
        ({"kv_cache_bytes": 1000}, "fewer than one sequence"),
        ({"kv_cache_bytes": 1 << 50, "tensor_parallel": 2}, r"kv_cache_bytes is 1048576 GiB; .*shared by 2 ranks"),
        ({"memory_fraction": 1e-9}, "the weights of a rank take"),
    ],
)
def test_options_that_do_not_fit_the_model_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    save_tiny(tmp_path)
    with pytest.raises(ConfigError, match=message):
        LLM(str(tmp_path), **options)
