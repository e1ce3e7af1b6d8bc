"""Steps with prompts in halves on GPUs: answers, bits, graphs, and a rank that dies. Run with ``pytest -m gpu``.

With ``SHOTCAST_SHARE_GPUS=1`` two ranks take turns on one GPU, which shows that results are right, and no speed.
"""

from __future__ import annotations

from pathlib import Path

import prefill_overlap_targets as targets
import pytest
import torch
import transformers

from shotcast.collectives.rank_device import enough_gpus
from shotcast.engine.prefill_forms import BY_COPIES
from shotcast.launcher.spawn import spawn
from shotcast.overlap.policy import SEQUENTIAL

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not enough_gpus(2), reason="needs two GPUs, or SHOTCAST_SHARE_GPUS=1"),
]
SIZES = 512, 768
STEPS = ((512,), (700,), (300, 468), (100, 3, 80, 200), (768,), (1,), (256, 256))
"""Prompts of a step: sizes of graphs with and without padding, cut and whole sequences, halves of padding alone."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=500,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        initializer_range=0.1,
        tie_word_embeddings=False,
    )
    path: Path = tmp_path_factory.mktemp("halves")
    transformers.LlamaForCausalLM(config).float().save_pretrained(path)
    return str(path)


def test_answers_are_those_of_whole_steps(folder: str) -> None:
    """Prompts come in chunks, with sequences that decode; they are computed twice by the same graphs."""
    draw = torch.Generator().manual_seed(3)
    lengths = 700, 20, 1000, 512, 900, 1
    prompts = [torch.randint(50, 490, (length,), generator=draw).tolist() for length in lengths]
    ways = ("off", BY_COPIES, "auto")
    ranks = spawn(targets.answers, 2, folder, "cuda", SIZES, 1024, ways, prompts, timeout_s=380)
    assert ranks[0] == ranks[1]
    expected = ranks[0]["off"][0]
    assert [len(answer) for answer in expected] == [4] * len(prompts)
    for way, (first, again, decisions) in ranks[0].items():
        assert first == again == expected, way
        print(way, {size: str(decision) for size, decision in decisions.items()})
    for decision in ranks[0]["auto"][2].values():
        shared = torch.cuda.device_count() < 2
        assert set(decision.median_us) == (set() if shared else {SEQUENTIAL, BY_COPIES})
        assert ("take turns" in decision.why) == shared


def test_bits_do_not_depend_on_halves_where_those_of_products_do_not(folder: str) -> None:
    """Sums over ranks, norms and attention are equal to the bit; so is all, with matmuls of equally many rows."""
    ways = SEQUENTIAL, BY_COPIES
    for found in spawn(targets.logits, 2, folder, "cuda", torch.bfloat16, SIZES, ways, STEPS, timeout_s=380):
        for number, (got, expected) in enumerate(zip(found[BY_COPIES], found[SEQUENTIAL], strict=True)):
            assert torch.equal(got, expected), number


def test_a_killed_rank_is_named(folder: str) -> None:
    outcomes = spawn(targets.killed, 2, folder, SIZES[:1], BY_COPIES, 1, timeout_s=200, return_exceptions=True)
    name, missing, reason, took = outcomes[0]
    assert (name, missing, reason) == ("CollectiveTimeout", (1,), "dead")
    assert took < 20
