"""Private PyTorch names, used only within this package."""

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
from torch.utils import _python_dispatch

from shotcast.collectives.vendor.nccl_library import keep_graphs_from_registering

ProcessGroup: Any = c10d.ProcessGroup
"""The base of process groups, which PyTorch types more strictly than it requires."""
Work: Any = c10d.Work
"""The base of the results of calls."""
AllgatherOptions: Any = c10d.AllgatherOptions
dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""Return the number of dispatch modes active on the thread."""


class DispatchMode(_python_dispatch.TorchDispatchMode):
    """The base of dispatch modes that does not involve torch.compile."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def users_modes() -> list[Any]:
    """Return the thread's dispatch modes, the top one last, without PyTorch's tracing modes below them."""
    return [mode for mode in _python_dispatch._get_current_dispatch_mode_stack() if not mode.is_infra_mode()]


@contextlib.contextmanager
def replaced_modes(modes: Sequence[Any]) -> Iterator[None]:
    """Replace :func:`users_modes` within the block."""
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


@functools.cache
def place_of_group(operator: Any) -> int | None:
    """Return the position of the group among the arguments of a ``torch.ops.c10d`` operator; None for others."""
    if getattr(operator, "namespace", None) != "c10d":
        return None
    names = [argument.name for argument in operator._schema.arguments]
    return names.index("process_group") if "process_group" in names else None


def premul_factor(op: Any) -> float | torch.Tensor:
    factor: float | torch.Tensor = op.__getstate__()[1]
    return factor


def plain(x: torch.Tensor) -> torch.Tensor:
    """Return the tensor behind a parameter, or behind a result of PyTorch's functional collectives, which it awaits.

    A tensor without data, such as in a trace, is returned unchanged.
    """
    if type(x) is torch.Tensor:
        return x.detach() if x.requires_grad else x
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    if isinstance(x, AsyncCollectiveTensor):
        x = x.wait()
    return x if has_no_data(x) else x.detach().as_subclass(torch.Tensor)


def has_no_data(x: torch.Tensor) -> bool:
    """Return whether a tensor is only a stand-in, such as in a trace."""
    if type(x) is torch.Tensor:
        return x.is_meta
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(x, FakeTensor) or x.is_meta


_BATCH = inspect.unwrap(distributed_c10d.batch_isend_irecv).__code__
_FRAMES_TO_BATCH = 24
"""The maximum number of frames from a group's method to the batch that called it; five without wrappers and modes."""


def batch_of_caller() -> tuple[Any, list[tuple[str, torch.Tensor, int, int]]] | None:
    """Return the frame of the ``batch_isend_irecv`` that issues this message, and its messages; None if there is none.

    PyTorch marks batches only for C++ backends. A message is its operation, tensor, peer in the group and tag, as
    :func:`torch.distributed.isend` would pass them to the group.
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


def inner_gloo(store: dist.Store, rank: int, world_size: int, timeout: timedelta, owner: Callable[[], Any]) -> Any:
    """Create a Gloo group. Collective.

    ``owner`` returns the process group around it, or None at its end: its ``_take_timeout`` is called with the timeouts
    that PyTorch sets for the inner group, and ``_allocate`` for tensors that PyTorch requests, for example in FSDP2.
    """
    made = _InnerGloo(store, rank, world_size, timeout)
    made.owner = owner
    return made


class _Inner:
    """The shared part of inner groups, which goes before their library's class."""

    owner: Callable[[], Any]

    def _set_default_timeout(self, timeout: timedelta) -> None:
        super()._set_default_timeout(timeout)  # type: ignore[misc]
        if (owner := self.owner()) is not None:
            owner._take_timeout(timeout)

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        tensor: torch.Tensor = self.owner()._allocate(size, dtype, device)
        return tensor


class _InnerGloo(_Inner, c10d.ProcessGroupGloo):
    options: Any = None  # PyTorch copies those of a group that it splits, and cannot copy those of Gloo

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return device.type == "cpu" or (device.type == "cuda" and torch.cuda.is_available())


def inner_nccl(
    store: dist.Store, rank: int, world_size: int, timeout: timedelta, owner: Callable[[], Any], options: Any = None
) -> Any:
    """Create an NCCL group, whose ranks connect on their first call; arguments as for :func:`inner_gloo`.

    ``options`` are NCCL options, whose timeout becomes ``timeout``; None for the defaults.
    """
    keep_graphs_from_registering()
    options = c10d.ProcessGroupNCCL.Options() if options is None else options
    options._timeout = timeout
    made = _nccl_class()(store, rank, world_size, options)
    made.owner = owner
    return made


@functools.cache
def _nccl_class() -> Any:
    """Return the class of inner NCCL groups, which CPU builds lack."""
    base: Any = c10d.ProcessGroupNCCL

    class InnerNccl(_Inner, base):
        """An NCCL group that tells PyTorch it can be split: the process group around it does the splitting."""

        def supports_tensor_alloc(self, device: torch.device) -> bool:
            return device.type == "cuda"

        def eager_connect_single_device(self, device: torch.device) -> None:
            """Do nothing: ranks connect when a call needs it."""

        def perform_nocolor_split(self, device: torch.device) -> None:
            """Do nothing: splitting involves only the ranks in the new group."""

    return InnerNccl


def are_nccl_options(options: Any) -> bool:
    """Return whether group options are NCCL options, which CPU builds lack."""
    nccl = getattr(c10d, "ProcessGroupNCCL", None)
    return nccl is not None and isinstance(options, nccl.Options)


def other_backends(name: str) -> dict[str, str]:
    """Return, by device, the backends other than ``name`` of the group that PyTorch is creating.

    PyTorch does not pass them to Python groups, so they are read from the calling function.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_name != "_new_process_group_helper":
        frame = frame.f_back
    config = None if frame is None else frame.f_locals.get("backend_config")
    if not isinstance(config, dist.BackendConfig):
        return {}
    return {device: other for device, other in config.get_device_backend_map().items() if other != name}


def bound_device() -> torch.device | None:
    """Return the device of ``init_process_group(device_id=...)``; None if not given, or if there is no group yet."""
    return getattr(dist.group.WORLD, "bound_device_id", None) if dist.is_initialized() else None


is_profiled: Callable[[], bool] = functools.partial(getattr, profiler, "_is_profiler_enabled")
"""Return whether a profiler is recording this process."""


def profiled_range(name: str, tensors: Iterable[torch.Tensor]) -> Any:
    """Create a profiler range with tensor shapes, which any thread may end."""
    return _profiler._RecordFunctionFast(name, list(tensors))


class OwnConnection:
    """A nonblocking connection to a job's store, shared by all groups of this process on that store.

    A store connection serves one call at a time, and PyTorch's calls block its connection while waiting for late ranks.
    Connecting takes a reverse lookup of the host's name on both sides, which takes 5 s if no name server answers.
    """

    def __init__(self, base: dist.Store):
        self._base = base  # its address names the connection for as long as that lasts
        self.store: dist.Store = base.clone()  # type: ignore[attr-defined]


_connections: weakref.WeakValueDictionary[int, OwnConnection] = weakref.WeakValueDictionary()


def own_connection(store: dist.Store) -> OwnConnection:
    """Return this process's connection to the store that holds the keys of ``store``. It lasts while it is used.

    Its keys are the underlying store's, without the prefix of ``store``.
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
    """Make Dynamo trace objects of a class derived from ProcessGroup as groups.

    PyTorch 2.11's Dynamo does not recognize derived classes as groups; 2.13's does. The class is added once Dynamo is
    imported. This function does not import it, which takes more than a second.
    """
    if _DYNAMO_GROUPS in sys.modules:
        _add_to_groups(sys.modules[_DYNAMO_GROUPS], kind)
    else:
        sys.meta_path.insert(0, _DynamoFinder(kind))


class _DynamoFinder(importlib.abc.MetaPathFinder):
    """Finds the Dynamo module that knows groups, and adds a class to them when it is executed."""

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
"""The work that DDP's ``join()`` has given each C++ reducer."""


@functools.cache
def keep_works_of_join() -> None:
    """Keep Python works alive as long as the reducers that DDP's ``join()`` gives them to.

    A reducer keeps only the C++ part, whose ``wait()`` never returns once the Python part is gone.
    """
    reducers: Any = c10d.Reducer
    give = reducers._set_forward_pass_work_handle

    def keep(reducer: Any, work: Any, *others: Any) -> None:
        _of_join[reducer] = work
        give(reducer, work, *others)

    reducers._set_forward_pass_work_handle = keep


@functools.cache
def run_untraced(*kinds: type) -> None:
    """Keep Dynamo from compiling the methods of classes, and anything that they call.

    If compiled code calls something that Dynamo cannot trace, it tries every function called from there that is not
    part of PyTorch. A C++ group has none.
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
