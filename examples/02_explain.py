"""What a call will do, and why, before it does it.

python examples/02_explain.py
"""

import torch

import shotcast
from shotcast.units import format_size


def work() -> list[str]:
    lines = []
    with shotcast.Communicator(device="cpu") as comm:
        for count in (256, 16_384, 1_048_576):
            x = torch.ones(count)
            lines.append(f"{format_size(x.nbytes):>8} of float32: {comm.explain(x)}")
        counters = torch.ones(256, dtype=torch.int64)
        lines.append(f"{format_size(counters.nbytes):>8} of int64:   {comm.explain(counters)}")
    return lines


if __name__ == "__main__":
    # Every rank chooses the same, as a choice uses only what all of them know. So rank 0 speaks for all.
    for line in shotcast.spawn(work, 2)[0]:
        print(line)
