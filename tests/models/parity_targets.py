"""Ranks of test_parity.py."""

from __future__ import annotations

import itertools
from typing import Any

import torch

import shotcast
from shotcast.layers.batch import Batch, PrefillMetadata
from shotcast.layers.parallel import Parallel
from shotcast.layers.weights import Weights
from shotcast.models.causal_lm import CausalLM
from shotcast.models.source import open_checkpoint

BLOCK = 4


class Tables:
    """Blocks of sequences in a paged cache, allocated in a scattered order."""

    def __init__(self, sequences: int, blocks: int):
        order = torch.randperm(sequences * blocks, generator=torch.Generator().manual_seed(3))
        self.blocks = order.to(torch.int32).view(sequences, blocks)

    def slot(self, sequence: int, position: int) -> int:
        return int(self.blocks[sequence, position // BLOCK]) * BLOCK + position % BLOCK

    def batch(self, parts: list[tuple[int, int, list[int]]]) -> Batch:
        """Make a batch of ``parts``: (sequence, tokens before, tokens), sorted by whether they have one token; all
        logits are wanted."""
        parts = sorted(parts, key=lambda part: len(part[2]) > 1)
        tokens = [token for _, _, new in parts for token in new]
        positions = [position for _, start, new in parts for position in range(start, start + len(new))]
        owners = [sequence for sequence, _, new in parts for _ in new]
        slots = [self.slot(*place) for place in zip(owners, positions, strict=True)]
        contexts = [start + len(new) for _, start, new in parts]
        decodes = sum(len(new) == 1 for _, _, new in parts)
        sequences = [sequence for sequence, _, _ in parts]
        prefills = None
        if several := parts[decodes:]:
            queries = (0, *itertools.accumulate(len(new) for _, _, new in several))
            keys = (0, *itertools.accumulate(contexts[decodes:]))
            kept = [self.slot(part[0], position) for part in several for position in range(part[1] + len(part[2]))]
            prefills = PrefillMetadata(queries, keys, torch.tensor(kept))
        return Batch(
            torch.tensor(tokens),
            torch.tensor(positions),
            torch.tensor(slots),
            decodes,
            torch.tensor(sequences[:decodes], dtype=torch.int64),
            torch.tensor(contexts[:decodes], dtype=torch.int32),
            prefills,
            None,
            self.blocks,
            None,
        )


@torch.inference_mode()
def logits(
    folder: str, stages: int, prompts: list[list[int]], chunk: int, decoded: int, options: dict[str, Any]
) -> list[torch.Tensor] | None:
    """Return the logits of all tokens of each prompt: in chunks, with the last ``decoded`` tokens one by one.

    Sequences are shifted by a step each, so that steps hold chunks and single tokens together.
    """
    checkpoint = open_checkpoint(folder)
    with shotcast.Communicator(device="cpu") as world:
        ranks = world.world_size // stages
        comm = world.split(world.rank // ranks) if stages > 1 else world
        parallel = Parallel(comm, world, stages, **options)
        model = CausalLM(
            checkpoint.config, Weights(checkpoint, torch.float32, torch.device("cpu")), parallel, 128, len(prompts)
        )
        tables = Tables(len(prompts), -(-max(map(len, prompts)) // BLOCK))
        caches = model.allocate_caches(tables.blocks.numel(), BLOCK)
        found: list[list[torch.Tensor]] = [[] for _ in prompts]
        waiting = {}
        for number, prompt in enumerate(prompts):
            cut = len(prompt) - decoded
            pieces = [prompt[start : min(start + chunk, cut)] for start in range(0, cut, chunk)]
            waiting[number] = pieces + [[token] for token in prompt[cut:]]
        done = [0] * len(prompts)
        step = 0
        while any(waiting.values()):
            taking = [number for number, pieces in waiting.items() if pieces and number <= step]
            parts = [(number, done[number], waiting[number].pop(0)) for number in taking]
            result = model(tables.batch(parts), caches)
            parts.sort(key=lambda part: len(part[2]) > 1)
            place = 0
            for number, _, new in parts:
                if result is not None:
                    found[number].append(result.values[place : place + len(new)])
                place += len(new)
                done[number] += len(new)
            step += 1
        if not parallel.last:
            return None
        return [torch.cat(parts) for parts in found]
