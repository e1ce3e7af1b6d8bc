"""Names of PyTorch that are not public, for this package alone."""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch._C import _profiler
from torch._C._dynamo import eval_frame as _eval_frame
from torch.autograd import profiler
from torch.distributed import distributed_c10d
from torch.utils import _python_dispatch, _pytree

from shotcast.collectives.vendor.nccl_library import keep_graphs_from_registering

Told = weakref.WeakMethod[Callable[[timedelta], None]]
"""A method that is told of a timeout, of an object that may be gone."""
Allocate = weakref.WeakMethod[Callable[[int, torch.dtype, torch.device], torch.Tensor]]
"""A method that makes a tensor of a number of elements, of an object that may be gone."""
ProcessGroup: Any = c10d.ProcessGroup
"""The base of process groups, which PyTorch gives a stricter type than it demands."""
Work: Any = c10d.Work
"""The base of the results of calls."""
AllgatherOptions: Any = c10d.AllgatherOptions
dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""Return how many dispatch modes the thread is in."""


class DispatchMode(_python_dispatch.TorchDispatchMode):
    """The base of dispatch modes, which needs nothing of torch.compile."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def users_modes() -> list[Any]:
    """Return the dispatch modes of the thread, the top one last, without those of PyTorch's own tracing below them."""
    return [mode for mode in _python_dispatch._get_current_dispatch_mode_stack() if not mode.is_infra_mode()]


@contextlib.contextmanager
def replaced_modes(modes: Sequence[Any]) -> Iterator[None]:
    """Put others in the place of :func:`users_modes`."""
    before = users_modes()
    _replace(before, modes)
    try:
        yield
    finally:
        _replace(modes, before)


def _replace(modes: Sequence[Any], others: Sequence[Any]) -> None:
    for _ in modes:
        _python_dispatch._pop_mode()
    for mode in others:
        _python_dispatch._push_mode(mode)


def group_of_operators(group: Any) -> Any:
    """Return a group of C++ of these ranks, whose methods are operators of ``torch.ops.c10d``."""
    return ProcessGroup(group.rank(), group.size())


@functools.cache
def place_of_group(operator: Any) -> int | None:
    """Return which argument of an operator of ``torch.ops.c10d`` is its group; None for other operators."""
    if getattr(operator, "namespace", None) != "c10d":
        return None
    names = [argument.name for argument in operator._schema.arguments]
    return names.index("process_group") if "process_group" in names else None


def unboxed_group(boxed: Any) -> Any:
    return ProcessGroup.unbox(boxed)


def tensors_of(arguments: Any) -> list[torch.Tensor]:
    """Return all tensors of the arguments of an operator."""
    return [x for x in _pytree.tree_leaves(arguments) if isinstance(x, torch.Tensor)]


def premul_factor(op: Any) -> float | torch.Tensor:
    factor: float | torch.Tensor = op.__getstate__()[1]
    return factor


def plain(x: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself for a parameter, or for a result of PyTorch's functional collectives, which it awaits.

    A tensor without data, as of a trace, is returned as it is.
    """
    if type(x) is torch.Tensor:
        return x.detach() if x.requires_grad else x
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    if isinstance(x, AsyncCollectiveTensor):
        x = x.wait()
    return x if has_no_data(x) else x.detach().as_subclass(torch.Tensor)


def has_no_data(x: torch.Tensor) -> bool:
    """Return whether a tensor only stands for one, as in a trace."""
    if type(x) is torch.Tensor:
        return x.is_meta
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(x, FakeTensor) or x.is_meta


_BATCH = inspect.unwrap(distributed_c10d.batch_isend_irecv).__code__
_FRAMES_TO_BATCH = 24
"""The most frames from a method of a group to the batch that called it; five without wrappers and dispatch modes."""


def batch_of_caller() -> tuple[Any, list[tuple[str, torch.Tensor, int, int]]] | None:
    """Return the frame of the ``batch_isend_irecv`` that issues this message, and all its messages; None for none.

    PyTorch tells backends of C++ alone that messages are a batch. A message is its operation, tensor, peer in the group
    and tag, as :func:`torch.distributed.isend` would give them to the group.
    """
    frame = sys._getframe(1)
    for _ in range(_FRAMES_TO_BATCH):
        if frame.f_code is _BATCH:
            return frame, [_message_of(op) for op in frame.f_locals["p2p_op_list"]]
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None


def _message_of(op: Any) -> tuple[str, torch.Tensor, int, int]:
    x = torch.view_as_real(op.tensor) if op.tensor.is_complex() else op.tensor
    return "send" if op.op is dist.isend else "recv", plain(x), op.group_peer, op.tag


def inner_gloo(
    store: dist.Store, rank: int, world_size: int, timeout: timedelta, told: Told, allocate: Allocate
) -> Any:
    """Make a group of Gloo. Collective.

    ``told`` is told of the timeouts that PyTorch sets for the group; ``allocate`` makes the tensors that PyTorch asks
    it for, as FSDP2 does.
    """
    made = _InnerGloo(store, rank, world_size, timeout)
    made.told, made.allocate = told, allocate
    return made


def _tell(told: Told, timeout: timedelta) -> None:
    method = told()
    if method is not None:
        method(timeout)


class _InnerGloo(c10d.ProcessGroupGloo):
    told: Told
    allocate: Allocate
    options: Any = None  # PyTorch copies those of a group that it splits, and cannot copy those of Gloo

    def _set_default_timeout(self, timeout: timedelta) -> None:
        super()._set_default_timeout(timeout)
        _tell(self.told, timeout)

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return device.type == "cpu" or (device.type == "cuda" and torch.cuda.is_available())

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return _allocated(self.allocate, size, dtype, device)


def _allocated(allocate: Allocate, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    method = allocate()
    assert method is not None
    return method(size, dtype, device)


def inner_nccl(
    store: dist.Store,
    rank: int,
    world_size: int,
    timeout: timedelta,
    told: Told,
    allocate: Allocate,
    options: Any = None,
) -> Any:
    """Make a group of NCCL, whose ranks connect at their first call; arguments as of :func:`inner_gloo`.

    ``options`` are those of NCCL, whose timeout becomes ``timeout``; None for the usual ones.
    """
    keep_graphs_from_registering()
    options = c10d.ProcessGroupNCCL.Options() if options is None else options
    options._timeout = timeout
    made = _nccl_class()(store, rank, world_size, options)
    made.told, made.allocate = told, allocate
    return made


@functools.cache
def _nccl_class() -> Any:
    """Return the class of inner groups of NCCL, which is not there in builds for the CPU."""
    base: Any = c10d.ProcessGroupNCCL

    class InnerNccl(base):
        """A group of NCCL that PyTorch takes for one that can be split: the process group around it splits itself."""

        told: Told
        allocate: Allocate

        def _set_default_timeout(self, timeout: timedelta) -> None:
            super()._set_default_timeout(timeout)
            _tell(self.told, timeout)

        def supports_tensor_alloc(self, device: torch.device) -> bool:
            return device.type == "cuda"

        def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            return _allocated(self.allocate, size, dtype, device)

        def eager_connect_single_device(self, device: torch.device) -> None:
            """Do nothing: ranks connect when a call needs it."""

        def perform_nocolor_split(self, device: torch.device) -> None:
            """Do nothing: to split needs those ranks alone that are in the new group."""

    return InnerNccl


def are_nccl_options(options: Any) -> bool:
    """Return whether options of a group are those of NCCL, which builds for the CPU do not have."""
    nccl = getattr(c10d, "ProcessGroupNCCL", None)
    return nccl is not None and isinstance(options, nccl.Options)


def other_backends(name: str) -> dict[str, str]:
    """Return by device the backends other than ``name`` of the group that PyTorch is making.

    PyTorch tells the maker of a group of Python of none, so they are those of the function that has called it.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_name != "_new_process_group_helper":
        frame = frame.f_back
    config = None if frame is None else frame.f_locals.get("backend_config")
    if not isinstance(config, dist.BackendConfig):
        return {}
    return {device: other for device, other in config.get_device_backend_map().items() if other != name}


def bound_device() -> torch.device | None:
    """Return the device of ``init_process_group(device_id=...)``, None if none was given or there is no group yet."""
    if not dist.is_initialized():
        return None
    world = dist.group.WORLD
    bound: torch.device | None = getattr(world, "bound_device_id", None)
    return bound


def has_nccl() -> bool:
    """Return whether this build has NCCL, and this process a GPU."""
    return bool(dist.is_nccl_available() and torch.cuda.is_available())


is_profiled: Callable[[], bool] = functools.partial(getattr, profiler, "_is_profiler_enabled")
"""Return whether a profiler records this process."""


def profiled_range(name: str, tensors: Iterable[torch.Tensor]) -> Any:
    """Return a range of a profile, with the shapes of its tensors. The thread that ends it may be another."""
    return _profiler._RecordFunctionFast(name, list(tensors))


class OwnConnection:
    """A connection to a job's store that nobody waits in, for all groups of this process on that store.

    A store serves one call at a time, and PyTorch's own calls wait in the one that it gives for ranks that are late.
    To connect takes a reverse look-up of the host's name on both sides, 5 s where no name server answers.
    """

    def __init__(self, base: dist.Store):
        self._base = base  # its address names the connection for as long as that lasts
        self.store: dist.Store = base.clone()  # type: ignore[attr-defined]


_connections: weakref.WeakValueDictionary[int, OwnConnection] = weakref.WeakValueDictionary()


def own_connection(store: dist.Store) -> OwnConnection:
    """Return the connection of this process to the store in which the keys of ``store`` are. It lasts while it is used.

    It has other keys: those of the store itself.
    """
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    found = _connections.get(id(store))
    if found is None:
        found = _connections[id(store)] = OwnConnection(store)
    return found


_DYNAMO_GROUPS = "torch._dynamo.variables.distributed"


@functools.cache
def trace_as_group(kind: type) -> None:
    """Have Dynamo trace objects of a class derived from ProcessGroup as groups.

    Dynamo of PyTorch 2.11 takes no derived class for a group; that of 2.13 does. It is told once it is imported, which
    this does not do, as that takes more than a second.
    """
    if _DYNAMO_GROUPS in sys.modules:
        _add_to_groups(sys.modules[_DYNAMO_GROUPS], kind)
    else:
        sys.meta_path.insert(0, _DynamoFinder(kind))


class _DynamoFinder(importlib.abc.MetaPathFinder):
    """Finds the module of Dynamo that knows groups, and adds a class to these when it is executed."""

    def __init__(self, kind: type):
        self._kind = kind

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _DYNAMO_GROUPS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            execute = loader.exec_module

            def execute_and_add(module: ModuleType) -> None:
                execute(module)
                _add_to_groups(module, self._kind)

            loader.exec_module = execute_and_add
        return spec


_of_join: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""The work that DDP's ``join()`` has given each reducer of C++."""


@functools.cache
def keep_works_of_join() -> None:
    """Let works of Python live as long as the reducers that DDP's ``join()`` gives them to.

    A reducer keeps the part of C++ alone, whose ``wait()`` never ends once that of Python is gone.
    """
    reducers: Any = c10d.Reducer
    give = reducers._set_forward_pass_work_handle

    def keep(reducer: Any, work: Any, *others: Any) -> None:
        _of_join[reducer] = work
        give(reducer, work, *others)

    reducers._set_forward_pass_work_handle = keep


@functools.cache
def run_untraced(*kinds: type) -> None:
    """Let Dynamo compile no method of classes, and nothing that one calls.

    It would: where code that it compiles calls what it cannot trace, it tries every function that is called from there
    which is not PyTorch's own. A group of C++ has none.
    """
    untraced = _eval_frame._FrameExecStrategy(_eval_frame._FrameAction.SKIP, _eval_frame._FrameAction.SKIP)
    for base in {base for kind in kinds for base in kind.__mro__ if base.__module__.startswith(__package__)}:
        for method in vars(base).values():
            if inspect.isfunction(method):
                _eval_frame.set_code_exec_strategy(method.__code__, untraced)


def _add_to_groups(module: Any, kind: type) -> None:
    groups = getattr(module, "ProcessGroupVariable", None)  # gone where derived classes are known
    if groups is not None:
        known = groups.is_process_group
        groups.is_process_group = staticmethod(lambda value: type(value) is kind or known(value))
