"""Train a small model by data parallelism, with gradients averaged under the backward.

    python examples/07_train.py
    torchrun --nproc-per-node 2 examples/07_train.py

Each rank has its own batches. DistributedDataParallel averages buckets of gradients over the backend in a thread (on
GPUs: on a stream) while the backward goes on, so the parameters have the same bits on all ranks and on every run.
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
    dist.init_process_group("shotcast")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank) if torch.cuda.device_count() >= ranks else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.manual_seed(0)  # the same model on all ranks
    data = torch.tensor([LETTERS.index(letter) for letter in TEXT * 2], device=device)
    model = DistributedDataParallel(NextLetter().to(device), bucket_cap_mb=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batches = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(STEPS):
        at = torch.randint(len(TEXT), (BATCH, 1), generator=batches) + torch.arange(CONTEXT + 1)
        letters = data[at.to(device)]
        loss = nn.functional.cross_entropy(model(letters[:, :-1]), letters[:, -1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach() / ranks
        dist.all_reduce(mean)
        losses.append(mean)
    bits = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    found = [torch.empty_like(bits) for _ in range(ranks)]
    dist.all_gather(found, bits)
    same = all(torch.equal(one, bits) for one in found)
    dist.destroy_process_group()
    return f"rank {rank}: loss {losses[0]:.2f} -> {losses[-1]:.2f}, the same parameters on all ranks: {same}"


if __name__ == "__main__":
    for line in [work()] if dist.is_torchelastic_launched() else shotcast.spawn(work, 2):
        print(line)
