"""A communication hook for DistributedDataParallel that averages gradient buckets during the backward pass.

    state = shotcast.overlap.GradientBuckets(comm)
    model = torch.nn.parallel.DistributedDataParallel(model)
    model.register_comm_hook(state, shotcast.overlap.average_gradients)

The communicator determines the order of reduction: the ranks' gradients are summed in rank order in float32, divided by
the number of ranks and rounded once (``docs/reference/numerics.md``).
"""

# no postponed annotations: PyTorch reads those of the hook

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from shotcast.collectives.communicator import Communicator
from shotcast.overlap.lanes import Lanes, lanes_of

SMS = 16
"""The SM limit of gradient all-reduces on exclusive communicators, which leaves the other SMs to the matmuls of the
backward pass. Otherwise buckets of 16 MiB or more use copy engines, and shorter ones use all SMs for less time."""


class GradientBuckets:
    """The state of :func:`average_gradients`.

    Args:
        ranks: a communicator; on CPU ranks optionally several, to have that many buckets in flight at once.
        algorithm: the algorithm of the all-reduces, as for :meth:`Communicator.all_reduce`. On one node ``auto``
            selects only lossless ones.
        sms: the most SMs that they may take. None means :data:`SMS` on the GPUs of one node if the communicator is
            exclusive, otherwise the default of ``algorithm``.

    Attributes:
        error: the error of the first failed all-reduce.
    """

    def __init__(self, ranks: Communicator | Sequence[Communicator], algorithm: str = "auto", sms: int | None = None):
        self._lanes: Lanes = lanes_of(ranks)
        self._algorithm, self._turn = algorithm, 0
        first = self._lanes.communicators[0]
        one_node = first.topology.shape.nodes == 1 and algorithm == "auto"
        keeps_to_sms = one_node and first.device.type == "cuda" and first.topology.exclusive
        self._sms = SMS if sms is None and keeps_to_sms else sms
        self._divides = not one_node  # other kernels than those of one node only sum
        self.error: Exception | None = None

    def average(self, gradients: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Start averaging ``gradients`` over the ranks, in place, and return a future of them.

        Every rank must pass buckets of equal sizes in the same order.
        """
        if self.error is not None:
            raise self.error
        lane = 1 + self._turn % self._lanes.count
        self._turn += 1
        comm = self._lanes.communicators[lane - 1]
        cuda = gradients.device.type == "cuda"
        done: torch.futures.Future[Any] = torch.futures.Future(devices=[gradients.device] if cuda else None)

        def work() -> None:
            with torch.no_grad():
                total = comm.all_reduce(
                    gradients,
                    out=gradients,
                    algorithm=self._algorithm,
                    reduction="sum" if self._divides else "avg",
                    sms=self._sms,
                )
                if self._divides:
                    total /= comm.world_size

        if cuda:  # an error is one of the call; what fails later, the next call or check reports

            def enqueue() -> None:
                work()
                done.set_result(gradients)  # it records the stream of communication, which is the current one

            self._lanes.post(lane, enqueue)
            return done

        def run() -> None:
            try:
                work()
            except Exception as error:
                self.error = self.error or error
            done.set_result(gradients)

        # DDP waits in C++, which knows the error of a callback, but not one that was set as a result
        checked = done.then(self._checked)
        self._lanes.post(lane, run)
        return checked

    def _checked(self, done: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
        if self.error is not None:
            raise self.error
        return done.value()

    def close(self) -> None:
        """End the threads of the hook, but leave the communicators open."""
        self._lanes.close()


def average_gradients(state: GradientBuckets, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket over the ranks of ``state``: a hook for ``DistributedDataParallel.register_comm_hook``."""
    return state.average(bucket.buffer())
