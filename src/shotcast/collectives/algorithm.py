"""An algorithm as an object, and the problems it serves: plain values and pure functions, without torch.

Everything that chooses, predicts, measures or documents algorithms reads these descriptions; nothing else knows their
names. The built-in ones are the modules of :mod:`shotcast.collectives.algorithms`.
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
"""The algorithm that is the vendor's library."""

Reference = str | Callable[..., Any] | Any
"""An object, or where it is as ``"package.module:name"``; a name is imported when it is first needed."""

FUSED = {
    Op.ALL_REDUCE_RMS_NORM: (Op.ALL_REDUCE,),
    Op.REDUCE_SCATTER_RMS_NORM: (Op.REDUCE_SCATTER,),
    Op.REDUCE_SCATTER_RMS_NORM_ALL_GATHER: (Op.ALL_REDUCE,),
    Op.ALL_REDUCE_LAYER_NORM: (Op.ALL_REDUCE_RMS_NORM, Op.ALL_REDUCE),
    Op.REDUCE_SCATTER_LAYER_NORM: (Op.REDUCE_SCATTER_RMS_NORM, Op.REDUCE_SCATTER),
    Op.REDUCE_SCATTER_LAYER_NORM_ALL_GATHER: (Op.REDUCE_SCATTER_RMS_NORM_ALL_GATHER, Op.ALL_REDUCE),
}
"""Fused operations, and those that move as much in as many steps, the most similar first."""
REDUCING = (Op.ALL_REDUCE, Op.REDUCE_SCATTER, Op.REDUCE, *FUSED)
"""Operations that add up."""


@dataclass(frozen=True, slots=True)
class Topology:
    """The facts that all ranks of a communicator share.

    Attributes:
        layout: the nodes of the ranks.
        device: ``"cuda"`` or ``"cpu"``.
        part: name of the GPU, or ``"cpu"``; tuned tables are made for one part.
        transport: what runs own algorithms.
        obstacle: why there are no native kernels; empty if there are.
        multicast: kernels may use a multicast address.
        max_bytes: the largest message of the workspace, in bytes.
        algorithms: the algorithms that were registered when the communicator was made.
        allow_fp8: ``auto`` may take algorithms that lose precision.
        network: what joins nodes.
        batch_invariant: reductions are by algorithms of the numerics contract alone, at every size.
        exclusive: calls may fill a GPU while they wait for other ranks.
    """

    layout: NodeLayout
    device: str
    part: str
    transport: Transport
    obstacle: str
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
        """Kernels of GPUs run here, if not for own algorithms then beside the library."""
        return self.device == "cuda" or self.transport.grids

    @property
    def shape(self) -> NodeShape:
        """Nodes and ranks of each; ranks of uneven nodes count as one node."""
        return self.layout.shape


@dataclass(frozen=True, slots=True)
class CollectiveProblem:
    """One call to be served; all fields but ``reduction`` and ``sms`` are those of :class:`shotcast.wire.CallPlan`.

    ``sms`` is the most SMs that native kernels may occupy on a GPU; 0 for any number.
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
        """Bytes of a row of a fused call; 0 where rows have no elements or there are no rows."""
        return self.norm.hidden * wire.DTYPES.get(self.dtype, 1) if self.norm is not None else 0


class Workspace(NamedTuple):
    """Bytes of the workspace that a call needs, and bytes that it may take."""

    needed: int
    room: int


def window_alone(problem: CollectiveProblem) -> Workspace:
    """Return the workspace of calls that pass through the window, of which every region has one."""
    return Workspace(0, problem.topology.max_bytes)


def whole_message(problem: CollectiveProblem) -> int:
    """Return the bytes of the message: the share of algorithms whose programs pass over all of it."""
    return problem.nbytes


def slice_of_message(problem: CollectiveProblem) -> int:
    """Return the bytes of a rank's slice: the share of algorithms whose programs pass over one slice."""
    return -(-problem.nbytes // problem.topology.world_size)


def slice_in_node(problem: CollectiveProblem) -> int:
    """Return the bytes of the slice that a rank sums up for its node, and exchanges with its peers on other nodes."""
    return -(-problem.nbytes // problem.topology.shape.ranks_per_node)


def message_fits(problem: CollectiveProblem) -> Workspace:
    """Return the workspace of algorithms that hold a message once."""
    return Workspace(problem.nbytes, problem.topology.max_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """The way in which an algorithm serves one operation.

    Attributes:
        work: ``work(nbytes, shape, itemsize)`` for a :class:`shotcast.wire.NodeShape`: steps, bytes sent and taken in,
            and values converted to or from FP8 by a rank; what the cost model asks.
        triton: ``bind(plan, context)``, the kernel with its arguments: a function that returns a
            :class:`shotcast.transport.triton.binding.KernelLaunch`. It stands beside the kernel.
        cpu: a :class:`shotcast.transport.cpu.host_call.HostCall`; empty if CPU ranks of one host have no compiled form.
        hosts: the same for CPU ranks of several nodes, which a network joins.
        reference: ``reference(inputs, rank, layout)``, the result in plain torch, bit for bit, from the inputs of all
            ranks and their nodes; what tests and the first check of a registered algorithm compare with.
        share: ``share(problem)``: bytes that a launch divides into tiles.
        large_warps: ``large_warps(world_size)``: warps of the programs of shares from 1 MiB on, whose tiles have 1024
            words; 0 where tiles stay at 512.
        launch: ``launch(problem)``: the launch, where it does not follow from ``share`` and ``large_warps``; it is not
            tuned then.
        between_nodes: it exchanges the sums of nodes, so it serves ranks on several nodes, and no others.
        workspace: ``workspace(problem)``: what a call needs of the workspace.
        obstacle: ``obstacle(problem)``: why this form cannot serve a problem, beyond what the other fields say; empty
            if it can.
        launches: ``launches(problem)``: other launches worth trying than the form's own one.
        launch_obstacle: ``launch_obstacle(problem, launch)``: why a launch that the kernel takes has no room in the
            workspace for this problem; empty if it has.
        divides: a message beyond the workspace passes in pieces.
        uneven: it takes parts of different sizes (all_gather).
        any_reduction: it has every reduction of :data:`shotcast.wire.REDUCED`; without, sums of
            :data:`shotcast.wire.REDUCIBLE` alone.
        any_dtype: it copies every dtype, not only those that kernels add up.
        keeps_to_sms: it serves calls that may occupy a number of SMs, and no others.
        flags_words: its words carry flags, for which those of some dtypes take twice the workspace.
        shared_from: the bytes of a message from which ``auto`` takes it on GPUs where the communicator is not
            exclusive, whatever tables say; 0 for none. Its grids wait for no other rank, so they may fill a GPU.
    """

    work: Callable[[int, NodeShape, int], Work]
    triton: Reference = ""
    cpu: Reference = ""
    hosts: Reference = ""
    reference: Reference = ""
    share: Callable[[CollectiveProblem], int] = whole_message
    large_warps: Callable[[int], int] = lambda world_size: 8
    launch: Callable[[CollectiveProblem], LaunchShape] | None = None
    between_nodes: bool = False
    workspace: Callable[[CollectiveProblem], Workspace] = message_fits
    obstacle: Callable[[CollectiveProblem], str] = lambda problem: ""
    launches: Callable[[CollectiveProblem], Sequence[LaunchShape]] = lambda problem: ()
    launch_obstacle: Callable[[CollectiveProblem, LaunchShape], str] = lambda problem, launch: ""
    divides: bool = False
    uneven: bool = True
    any_reduction: bool = False
    any_dtype: bool = True
    keeps_to_sms: bool = False
    flags_words: bool = True
    shared_from: int = 0

    def kernel(self, field: str) -> Reference:
        """Return the kernel of a transport, by the field that has it; empty if there is none."""
        return getattr(self, field, "")


def in_rank_order(shape: NodeShape) -> bool:
    """Return whether sums in the order of ranks are those of the contract.

    They are on one node. Nodes of one rank each are added in a tree, which is the order of ranks for up to three.
    """
    return shape.nodes == 1 or (shape.ranks_per_node == 1 and shape.nodes <= 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """One way to serve collectives: a description that names its kernels.

    Attributes:
        name: as calls, environment and tables name it: lower case, digits and underscores.
        label: as tables and pictures write it.
        summary: one line: what moves in which step.
        forms: by operation, how it is served.
        in_contract: ``in_contract(shape)`` for a :class:`shotcast.wire.NodeShape`: whether sums have the bits of the
            numerics contract (``docs/reference/numerics.md``). ``auto`` takes no other algorithm for reductions.
        lossy: sums lose precision by design; ``auto`` takes it only where ``allow_fp8`` is set.
        by_name: ``auto`` takes it only by ``shared_from`` of a form, or for ``sms=0``; else a call names it, or
            SHOTCAST_ALGORITHM does.
        error_bound: of lossy algorithms, ``error_bound(inputs)``: how far off the sum of the float64 ``inputs`` of all
            ranks (an iterable) may be, element by element, beyond the rounding of the dtype.
        multicast: it needs a multicast address.
        library: calls are those of the vendor's library (NCCL or Gloo), after ranks have compared headers.
        color: of its line in pictures; empty for one of the default cycle.
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
        """True if the algorithm serves ranks on several nodes only."""
        return any(form.between_nodes for form in self.forms.values())

    @property
    def keeps_to_sms(self) -> bool:
        """True if the algorithm serves calls that are given a number of SMs, and no others."""
        return any(form.keeps_to_sms for form in self.forms.values())

    def keeps_bits(self, op: Op, shape: NodeShape) -> bool:
        """Return whether results have the bits of the numerics contract. Copies are exact whoever makes them."""
        return op not in REDUCING or (self.in_contract(shape) and not self.lossy)


def imported(reference: Reference) -> Any:
    """Return the object that ``reference`` is, or names."""
    return pkgutil.resolve_name(reference) if isinstance(reference, str) else reference


@dataclass(frozen=True, eq=False)
class Algorithms(Mapping[str, Algorithm]):
    """The algorithms of a communicator by name; the position of each is its code in headers."""

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

    @property
    def names(self) -> tuple[str, ...]:
        """Names in the order of their codes."""
        return tuple(self._codes)

    def serving(self, op: Op) -> tuple[Algorithm, ...]:
        """Return the algorithms that serve an operation, own ones first, then the library."""
        return tuple(sorted((one for one in self.members if op in one.forms), key=lambda one: one.library))

    def header(self, plan: wire.CallPlan) -> wire.HeaderWords:
        """Return the header of a call. Raises ConfigError if its size has no room there."""
        return wire.encode_header(plan, self._codes[plan.algorithm])

    def form(self, plan: wire.CallPlan) -> Form:
        """Return how ``plan`` is served. Raises UnsupportedError for an algorithm that does not serve the operation."""
        algorithm = self.get(plan.algorithm)
        if algorithm is None or plan.op not in algorithm.forms:
            raise UnsupportedError(f"there is no {plan.algorithm} {plan.op.label} of {plan.dtype}")
        return algorithm.forms[plan.op]

    def kernel(self, plan: wire.CallPlan, field: str) -> Any:
        """Return the kernel in a field of the form of ``plan``, imported once. Raises UnsupportedError without one."""
        key = plan.op, plan.algorithm, field
        if key not in self._kernels:
            reference = self.form(plan).kernel(field)
            if not reference:
                raise UnsupportedError(f"there is no {plan.algorithm} {plan.op.label} for {field} kernels")
            self._kernels[key] = imported(reference)
        return self._kernels[key]
