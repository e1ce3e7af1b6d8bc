"""A program that ends with a call under way, and without destroying its process group.

``python ending_program.py CASE``, with the environment of torchrun: ``waiting`` for a rank that makes no such call,
``pending`` for a call that nobody waits for, ``callback`` for one whose future has a callback.
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from shotcast.process_group.registration import register


def main(case: str) -> None:
    register()
    dist.init_process_group("shotcast", timeout=timedelta(seconds=60))
    x = torch.ones(4)
    dist.all_reduce(x)
    if case == "waiting" and dist.get_rank() == 1:
        time.sleep(1)
        return
    work = dist.all_reduce(x, async_op=True)
    if case == "callback":
        work.get_future().then(lambda _: [time.sleep(0.0005) for _ in range(500)])


if __name__ == "__main__":
    main(sys.argv[1])
