"""Train a small model by data parallelism, with gradients averaged under the backward.

    python examples/07_train.py
    torchrun --nproc-per-node 2 examples/07_train.py

Each rank has its own batches. The hook averages each bucket of gradients in a thread (on GPUs: on a stream) while the
backward computes the next, in the order of ranks, so the parameters have the same bits on all ranks and on every run.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import shotcast

STEPS, BATCH, CONTEXT = 200, 32, 3
TEXT = "the quick brown fox jumps over the lazy dog and the lazy dog sleeps under the quick brown fox. "
LETTERS = sorted(set(TEXT))


class NextLetter(nn.Module):
    """Predicts a letter from the letters before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(LETTERS), 32)
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(32 * CONTEXT, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU()
        )
        self.head = nn.Linear(256, len(LETTERS))

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embed(letters)))


def work() -> str:
    with shotcast.Communicator() as comm:
        torch.manual_seed(0)  # the same model on all ranks
        data = torch.tensor([LETTERS.index(letter) for letter in TEXT * 2], device=comm.device)
        model = DistributedDataParallel(NextLetter().to(comm.device), bucket_cap_mb=0.1)
        state = shotcast.overlap.GradientBuckets(comm)
        model.register_comm_hook(state, shotcast.overlap.average_gradients)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        batches = torch.Generator().manual_seed(comm.rank)
        losses = []
        for _ in range(STEPS):
            at = torch.randint(len(TEXT), (BATCH, 1), generator=batches) + torch.arange(CONTEXT + 1)
            letters = data[at.to(comm.device)]
            loss = nn.functional.cross_entropy(model(letters[:, :-1]), letters[:, -1])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(comm.all_reduce(loss.detach()) / comm.world_size)
        bits = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        same = bool((comm.all_gather(bits).view(comm.world_size, -1) == bits).all())
        state.close()
        return f"rank {comm.rank}: loss {losses[0]:.2f} -> {losses[-1]:.2f}, the same parameters on all ranks: {same}"


if __name__ == "__main__":
    for line in [work()] if dist.is_torchelastic_launched() else shotcast.spawn(work, 2):
        print(line)
