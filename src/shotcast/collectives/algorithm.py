"""Algorithms as objects, and the problems they serve: plain values and pure functions, without torch.

Code that chooses, predicts, measures or documents algorithms reads these descriptions; nothing else knows their names.
The built-in ones are the modules of :mod:`shotcast.collectives.algorithms`.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shotcast import wire
from shotcast.cost.collective import Work
from shotcast.errors import UnsupportedError
from shotcast.hardware.nodes import NodeLayout
from shotcast.transport.transport import NO_NETWORK, Network, Transport
from shotcast.wire import LaunchShape, NodeShape, Norm, Op

LIBRARY = "vendor"
"""The name of the algorithm that calls the vendor's library."""

Reference = str | Callable[..., Any] | Any
"""An object, or its location as ``"package.module:name"``, imported on first use."""

FUSED = {
    Op.ALL_REDUCE_RMS_NORM: (Op.ALL_REDUCE,),
    Op.ALL_REDUCE_LAYER_NORM: (Op.ALL_REDUCE_RMS_NORM, Op.ALL_REDUCE),
}
"""Fused operations, each with the plain ones that move as much in as many steps, most similar first."""
REDUCING = (Op.ALL_REDUCE, Op.REDUCE_SCATTER, Op.REDUCE, *FUSED)
"""Operations that reduce."""


@dataclass(frozen=True, slots=True)
class Topology:
    """The facts that all ranks of a communicator share.

    Attributes:
        layout: the nodes of the ranks.
        device: ``"cuda"`` or ``"cpu"``.
        part: name of the GPU, or ``"cpu"``; tuned tables are made for one part.
        transport: the transport that runs native algorithms.
        unsupported_reason: why there are no native kernels; empty if there are.
        multicast: kernels may use a multicast address.
        max_bytes: the largest message of the workspace, in bytes.
        algorithms: the algorithms registered when the communicator was created.
        allow_fp8: ``auto`` may take algorithms that lose precision.
        network: the network between nodes.
        batch_invariant: reductions use only algorithms of the numerics contract, at every size.
        exclusive: calls may fill a GPU while they wait for other ranks.
    """

    layout: NodeLayout
    device: str
    part: str
    transport: Transport
    unsupported_reason: str
    multicast: bool
    max_bytes: int
    algorithms: Algorithms
    allow_fp8: bool = False
    network: Network = NO_NETWORK
    batch_invariant: bool = False
    exclusive: bool = True

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.layout.world_size

    @property
    def runs_grids(self) -> bool:
        """True if GPU kernels run here, either for native algorithms or along with the library."""
        return self.device == "cuda" or self.transport.grids

    @property
    def shape(self) -> NodeShape:
        """The nodes and the ranks of each; ranks of uneven nodes count as one node."""
        return self.layout.shape


@dataclass(frozen=True, slots=True)
class CollectiveProblem:
    """One call to serve; all fields but ``reduction`` and ``sms`` match :class:`shotcast.wire.CallPlan`.

    ``sms`` limits the SMs that native kernels may occupy on a GPU; 0 for no limit.
    """

    op: Op
    nbytes: int
    dtype: str
    topology: Topology
    root: int = 0
    sizes: tuple[int, ...] = ()
    reduction: str = "sum"
    norm: Norm | None = None
    sms: int = 0

    @property
    def row_bytes(self) -> int:
        """Bytes in a row of a fused call; 0 if rows are empty or there are none."""
        return self.norm.hidden * wire.DTYPES.get(self.dtype, 1) if self.norm is not None else 0


class Workspace(NamedTuple):
    """The workspace bytes that a call needs, and the most that it may use."""

    needed: int
    capacity: int


def window_alone(problem: CollectiveProblem) -> Workspace:
    """Return the workspace of calls that only pass through the window, which every region has."""
    return Workspace(0, problem.topology.max_bytes)


def slice_of_message(problem: CollectiveProblem) -> int:
    """Return the size of a rank's slice in bytes: the share of algorithms whose programs traverse one slice."""
    return -(-problem.nbytes // problem.topology.world_size)


def slice_in_node(problem: CollectiveProblem) -> int:
    """Return the bytes of the slice that a rank sums for its node and exchanges with its peers on other nodes."""
    return -(-problem.nbytes // problem.topology.shape.ranks_per_node)


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """The implementation of one operation by an algorithm.

    Attributes:
        work: ``work(nbytes, shape, itemsize)`` for a :class:`shotcast.wire.NodeShape`: steps, and bytes sent and
            taken in by a rank, for the cost model.
        triton: ``bind(plan, context)``, the kernel with its arguments: a function that returns a
            :class:`shotcast.transport.triton.binding.KernelLaunch`. Defined next to the kernel.
        cpu: a :class:`shotcast.transport.cpu.host_call.HostCall`; empty if CPU ranks of one host have no compiled
            variant.
        hosts: the same for CPU ranks on several nodes joined by a network.
        reference: ``reference(inputs, rank, layout)``, the result in plain torch, bit for bit, from the inputs of all
            ranks and their nodes. The first check of a registered algorithm compares with it.
        share: ``share(problem)``: bytes that a launch divides into tiles; the message, if programs traverse all of it.
        large_warps: ``large_warps(world_size)``: warps of the programs of shares from 1 MiB on, whose tiles have 1024
            words; 0 where tiles stay at 512, and 1 where all programs have one warp and 128 words.
        launch: ``launch(problem)``: the launch, if it does not follow from ``share`` and ``large_warps``; such launches
            are not tuned.
        between_nodes: it exchanges the sums of nodes, so it serves only ranks on several nodes.
        workspace: ``workspace(problem)``: the workspace that a call needs; to hold the message once, unless given.
        unsupported_reason: ``unsupported_reason(problem)``: why this form cannot serve a problem, beyond what the other
            fields say; empty if it can.
        launches: ``launches(problem)``: alternative launches worth trying.
        launch_unsupported_reason: ``launch_unsupported_reason(problem, launch)``: why a launch that the kernel accepts
            does not fit the workspace for this problem; empty if it fits.
        divides: a message larger than the workspace is sent in pieces.
        uneven: it takes parts of different sizes (all_gather).
        any_reduction: it has every reduction of :data:`shotcast.wire.REDUCED`; if False, only sums of
            :data:`shotcast.wire.REDUCIBLE`.
        any_dtype: it copies every dtype, not only the ones that kernels can add.
        keeps_to_sms: it serves only SM-limited calls.
        flags_words: its words carry flags, so some dtypes take twice the workspace.
        shared_from: the bytes of a message from which ``auto`` selects it on GPUs if the communicator is not exclusive,
            regardless of tables; 0 for none. Its grids wait for no other rank, so they may fill a GPU.
        shared_to: the bytes up to which ``auto`` selects it there; 0 for no limit.
    """

    work: Callable[[int, NodeShape, int], Work]
    triton: Reference = ""
    cpu: Reference = ""
    hosts: Reference = ""
    reference: Reference = ""
    share: Callable[[CollectiveProblem], int] = lambda problem: problem.nbytes
    large_warps: Callable[[int], int] = lambda world_size: 1 if world_size == 2 else 8
    launch: Callable[[CollectiveProblem], LaunchShape] | None = None
    between_nodes: bool = False
    workspace: Callable[[CollectiveProblem], Workspace] = lambda problem: Workspace(
        problem.nbytes, problem.topology.max_bytes
    )
    unsupported_reason: Callable[[CollectiveProblem], str] = lambda problem: ""
    launches: Callable[[CollectiveProblem], Sequence[LaunchShape]] = lambda problem: ()
    launch_unsupported_reason: Callable[[CollectiveProblem, LaunchShape], str] = lambda problem, launch: ""
    divides: bool = False
    uneven: bool = True
    any_reduction: bool = False
    any_dtype: bool = True
    keeps_to_sms: bool = False
    flags_words: bool = True
    shared_from: int = 0
    shared_to: int = 0

    def kernel(self, field: str) -> Reference:
        """Return a transport's kernel from the field that holds it; empty if there is none."""
        return getattr(self, field, "")


def in_rank_order(shape: NodeShape) -> bool:
    """Return whether adding in rank order gives the sums of the numerics contract.

    It does on one node. Nodes of one rank each are added in a tree, which equals rank order for up to three.
    """
    return shape.nodes == 1 or (shape.ranks_per_node == 1 and shape.nodes <= 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """An algorithm for collectives: a description that names its kernels.

    Attributes:
        name: its name in calls, environment variables and tables: lower case, digits and underscores.
        label: its display name in tables and plots.
        summary: one line: what moves in which step.
        forms: how each operation is served.
        in_contract: ``in_contract(shape)`` for a :class:`shotcast.wire.NodeShape`: whether sums have the bits of the
            numerics contract (``docs/reference/numerics.md``). ``auto`` selects no other algorithm for reductions.
        lossy: sums lose precision by design; ``auto`` selects it only if ``allow_fp8`` is set.
        by_name: ``auto`` selects it only through ``shared_from`` of a form, or for ``sms=0``; otherwise a call or
            SHOTCAST_ALGORITHM must name it.
        error_bound: for lossy algorithms, ``error_bound(inputs)``: the elementwise error bound of the sum of the
            float64 ``inputs`` of all ranks (an iterable), beyond the rounding of the dtype.
        multicast: it needs a multicast address.
        library: it calls the vendor's library (NCCL or Gloo) after ranks have compared headers.
        color: its color in plots; empty for one of the default cycle.
    """

    name: str
    label: str
    summary: str
    forms: Mapping[Op, Form]
    in_contract: Callable[[NodeShape], bool] = in_rank_order
    lossy: bool = False
    by_name: bool = False
    error_bound: Reference = ""
    multicast: bool = False
    library: bool = False
    color: str = ""

    @property
    def is_fused(self) -> bool:
        """True if native kernels of the algorithm serve a fused operation."""
        return not self.library and any(op in self.forms for op in FUSED)

    @property
    def between_nodes(self) -> bool:
        """True if the algorithm serves only ranks on several nodes."""
        return any(form.between_nodes for form in self.forms.values())

    @property
    def keeps_to_sms(self) -> bool:
        """True if the algorithm serves only SM-limited calls."""
        return any(form.keeps_to_sms for form in self.forms.values())

    def keeps_bits(self, op: Op, shape: NodeShape) -> bool:
        """Return whether results have the bits of the numerics contract. Copies are always exact."""
        return op not in REDUCING or (self.in_contract(shape) and not self.lossy)


def imported(reference: Reference) -> Any:
    """Resolve ``reference`` to the object that it is or names."""
    return pkgutil.resolve_name(reference) if isinstance(reference, str) else reference


@dataclass(frozen=True, eq=False)
class Algorithms(Mapping[str, Algorithm]):
    """The algorithms of a communicator by name, in the order of their codes in headers."""

    members: tuple[Algorithm, ...]
    _codes: dict[str, int] = field(init=False, repr=False)
    _kernels: dict[tuple[Op, str, str], Any] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        codes = {algorithm.name: code for code, algorithm in enumerate(self.members)}
        object.__setattr__(self, "_codes", codes)

    def __getitem__(self, name: str) -> Algorithm:
        return self.members[self._codes[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._codes)

    def __len__(self) -> int:
        return len(self.members)

    def serving(self, op: Op) -> tuple[Algorithm, ...]:
        """Return the algorithms that serve an operation: native ones first, then the library."""
        return tuple(sorted((one for one in self.members if op in one.forms), key=lambda one: one.library))

    def header(self, plan: wire.CallPlan) -> wire.HeaderWords:
        """Build the header of a call. Raises ConfigError if its size does not fit."""
        return wire.encode_header(plan, self._codes[plan.algorithm])

    def form(self, plan: wire.CallPlan) -> Form:
        """Return the form that serves ``plan``. Raises UnsupportedError if the algorithm does not support it."""
        algorithm = self.get(plan.algorithm)
        if algorithm is None or plan.op not in algorithm.forms:
            raise UnsupportedError(f"there is no {plan.algorithm} {plan.op.label} of {plan.dtype}")
        return algorithm.forms[plan.op]

    def kernel(self, plan: wire.CallPlan, field: str) -> Any:
        """Return the kernel in a field of the form of ``plan``, imported once. Raises UnsupportedError if missing."""
        key = plan.op, plan.algorithm, field
        if key not in self._kernels:
            reference = self.form(plan).kernel(field)
            if not reference:
                raise UnsupportedError(f"there is no {plan.algorithm} {plan.op.label} for {field} kernels")
            self._kernels[key] = imported(reference)
        return self._kernels[key]
