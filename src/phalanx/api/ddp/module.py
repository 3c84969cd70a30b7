"""The DDP module: torch's constructor, attributes and methods; what they do is the engine's and its neighbours'."""

from __future__ import annotations

import logging
import time
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _tree_flatten_with_rref

from phalanx.api import engines, optimizer_watch
from phalanx.api.ddp import contexts
from phalanx.api.ddp.buffer_sync import BufferSync
from phalanx.api.ddp.comm_hooks import CommHooks
from phalanx.api.ddp.construction import (
    choose_buffer_sync,
    choose_group,
    problem_with,
    sync_module_states,
    trained_parameters,
    verify_alike,
)
from phalanx.api.ddp.delayed import DelayedParameters, problem_with_delay
from phalanx.api.ddp.inputs import to_device
from phalanx.api.ddp.joining import Joining
from phalanx.api.ddp.logger import Logger
from phalanx.api.ddp.mixed_precision import cast_module, precision_of
from phalanx.api.ddp.options import BucketCaps, Devices, engine_options
from phalanx.api.ddp.pickling import Pickling
from phalanx.api.ddp.torch_reducer import TorchReducer
from phalanx.api.lowering import Lowering
from phalanx.comm.c10d import C10dGroup, group_of
from phalanx.hooks.call import TorchHook
from phalanx.optim.in_backward import StepInBackward, keep, problem_with_parameters, take_over
from phalanx.reducer.reducer import Reducer
from phalanx.reducer.spans import span
from phalanx.reducer.watch import expects_sparse

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

logger = logging.getLogger(__name__)


class DistributedDataParallel(BufferSync, CommHooks, DelayedParameters, Joining, Pickling, TorchDDP):
    """Wraps a module so that backward averages its gradients over the ranks: torch's class, on Phalanx's engine.

    Arguments, attributes and errors are those of `torch.nn.parallel.DistributedDataParallel`, whose documentation
    holds; it is a subclass, so ``isinstance`` holds too. What differs is listed in docs/parity.md. New code is better
    off with `phalanx.replicate`, which needs no wrapper and no flags.
    """

    # In the place of torch's C++ objects, with their methods.
    logger: Logger | None
    reducer: TorchReducer  # type: ignore[assignment]

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Sequence[tuple[str, nn.Parameter]] | None = None,
        param_to_hook_all_reduce: nn.Parameter | None = None,
        mixed_precision: Any = None,
        device_mesh: DeviceMesh | None = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: list[int] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
    ) -> None:
        nn.Module.__init__(self)
        Joinable.__init__(self)
        self.logger = None
        delay_problem = problem_with_delay(module, delay_all_reduce_named_params, param_to_hook_all_reduce)
        precision = precision_of(mixed_precision)
        if precision is not None and (misfit := precision.problem_with(module)) is not None:
            raise misfit
        self.process_group = choose_group(process_group, device_mesh)
        if device_mesh is not None:
            self.device_mesh = device_mesh
        delayed = [] if delay_problem is not None else list(delay_all_reduce_named_params or ())
        self._delay_arguments = (delayed, param_to_hook_all_reduce)
        self._delay_all_reduce_params = [parameter for _, parameter in delayed]
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self.parameters_to_ignore.update(name for name, _ in delayed)
        self._module_parameters = [p for n, p in module.named_parameters() if n not in self.parameters_to_ignore]
        self._set_devices(module, device_ids, output_device, init_sync=init_sync, problem=delay_problem)
        self.static_graph = False
        self.dim = dim
        self.module = module
        self.device = (self._module_parameters or self._delay_all_reduce_params)[0].device
        self.forward_sync_buffers, init_sync_buffers = choose_buffer_sync(broadcast_buffers, forward_sync_buffers)
        self.find_unused_parameters = find_unused_parameters
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.batched_grad_copy = batched_grad_copy
        self.mixed_precision = mixed_precision
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        if check_reduction:
            warnings.warn(
                "`check_reduction` is deprecated and does nothing: reduction always completes.",
                FutureWarning,
                stacklevel=2,
            )
        self.broadcast_bucket_size = 250 * 1024 * 1024
        self._caps = BucketCaps.of(bucket_cap_mb, bucket_cap_mb_list)
        self.bucket_bytes_cap = self._caps.bucket_bytes
        self.bucket_bytes_cap_list = list(self._caps.per_bucket_bytes)
        self.bucket_bytes_cap_default = self._caps.is_default
        self._comm_hooks: list[tuple[TorchHook, object]] = []
        self._ddp_sink_clone = True
        self._has_rebuilt_buckets = False
        self._lazy_init_ran = False
        self._use_python_reducer = False
        self.use_side_stream_for_tensor_copies = False  # read by torch's `to_kwargs`; ours copies on the current stream
        self._accum_grad_hooks: list[Any] = []
        self._delay_grad_buffer: torch.Tensor | None = None
        self._delay_grad_views: list[torch.Tensor] = []
        self._delayed = None
        parameters, sparse = self._build_params_for_reducer()
        self._delay_all_reduce_all_params = bool(delayed) and not parameters
        names = self._build_debug_param_to_name_mapping(parameters)
        if init_sync:
            named = [(names[index], parameter) for index, parameter in enumerate(parameters)]
            policy = self._caps.policy(parameters)
            verify_alike(self._group(), named, lowering=self._make_lowering(), policy=policy)
            self._sync_module_states(source=0, buffers=init_sync_buffers)
        if self._delay_all_reduce_params:
            assert param_to_hook_all_reduce is not None
            self._register_delay_all_reduce_hook(self.bucket_bytes_cap, param_to_hook_all_reduce, device_ids)
        if self._delay_all_reduce_all_params:
            return
        cast_module(module, mixed_precision, self.parameters_to_ignore)
        self._build_engine(parameters, sparse, names, static_graph)
        if static_graph:
            self._set_static_graph()

    # -- construction ---------------------------------------------------------------------------------------------

    def _set_devices(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None,
        output_device: int | torch.device | None,
        *,
        init_sync: bool,
        problem: Exception | None = None,
    ) -> None:
        """Look at what is to be wrapped. A rank that cannot go on says why to the others, which come to verify."""
        problem = problem or problem_with(
            module,
            self._module_parameters,
            self._group(),
            delayed=bool(self._delay_all_reduce_params),
        )
        parameters = self._module_parameters or self._delay_all_reduce_params
        try:
            devices = None if problem is not None else Devices.of(parameters, device_ids, output_device)
        except ValueError as error:
            problem = error
        if problem is not None:
            if init_sync:
                verify_alike(self._group(), (), problem)
            raise problem
        assert devices is not None
        self.is_multi_device_module, self.device_type = devices.several, devices.type
        self.device_ids, self.output_device = devices.ids, devices.output

    def _group(self) -> C10dGroup:
        return group_of(self.process_group)

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        """Parameters that need a gradient and are not ignored, each once, and which of them have sparse gradients."""
        named = trained_parameters(self.module, self.parameters_to_ignore)
        self._assign_modules_buffers()
        return [parameter for _, parameter in named], expects_sparse(self.module, named)

    def _build_debug_param_to_name_mapping(self, parameters: Sequence[nn.Parameter]) -> dict[int, str]:
        index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
        mapping: dict[int, str] = {}
        for name, parameter in trained_parameters(self.module, self.parameters_to_ignore):
            if id(parameter) not in index_of:
                self._log_and_throw(
                    ValueError,
                    f"Param with name {name} found in module parameters, but not DDP parameters. "
                    "It was added, or its requires_grad changed, after the module was wrapped.",
                )
            mapping[index_of[id(parameter)]] = name
        if len(mapping) != len(index_of):
            self._log_and_throw(
                ValueError,
                "Expected param to name mapping to cover all parameters, but got conflicting lengths: "
                f"{len(index_of)} vs {len(mapping)}.",
            )
        return mapping

    def _sync_module_states(self, *, source: int, buffers: bool) -> None:
        sync_module_states(self._group(), self.module, self.parameters_to_ignore, source=source, buffers=buffers)

    def _make_lowering(self) -> Lowering | None:
        precision = precision_of(self.mixed_precision)
        if precision is None:
            return None
        return Lowering(self.module, precision, without={name.lstrip(".") for name in self.parameters_to_ignore})

    def _build_engine(
        self, parameters: Sequence[nn.Parameter], sparse: Sequence[bool], names: dict[int, str], static: bool
    ) -> None:
        self._lowering = self._make_lowering()
        if self._lowering is not None:
            self._lowering.install()
        options = engine_options(
            self._caps,
            parameters,
            as_view=self.gradient_as_bucket_view,
            find_unused=self.find_unused_parameters,
            static=static,
            skip_unused=self.skip_all_reduce_unused_params,
            wire_dtype=None if self._lowering is None else self._lowering.policy.reduce_dtype,
        )
        self._engine = Reducer(
            [(names[index], parameter) for index, parameter in enumerate(parameters)],
            self._group(),
            sparse=sparse,
            options=options,
            name=type(self.module).__name__,
        )
        # The parameters' hooks keep the engine. Left behind, they would take part in what another instance does with them.
        weakref.finalize(self, self._engine.remove_hooks).atexit = False
        self.logger = Logger(self._engine)
        self._engine.on_error = self.logger.set_error_and_log
        self.reducer = TorchReducer(
            self._engine,
            self.process_group,
            find_unused=self.find_unused_parameters,
            on_error=self.logger.set_error_and_log,
        )
        contexts.remember(self._engine)
        engines.add(self._engine)
        self._contexts: contexts.ContextGradients | None = None
        self._shadows_context = False
        has_sync_bn = any(isinstance(submodule, nn.SyncBatchNorm) for submodule in self.module.modules())
        self.logger.set_construction_data(self, has_sync_bn=has_sync_bn)
        self._passing_sync_batchnorm_handle(self.module)
        if self._delayed is not None:
            self._delayed.follow(self._engine)
        if self.find_unused_parameters:
            self._watched = _WatchedDDP(self._engine, self.reducer)
            optimizer_watch.watch(self._watched)

    def _passing_sync_batchnorm_handle(self, module: nn.Module) -> None:
        if self.device_type == "cpu":
            for layer in module.modules():
                if type(layer) is torch.nn.modules.batchnorm.SyncBatchNorm:
                    self._log_and_throw(ValueError, "SyncBatchNorm layers only work with GPU modules")

    def _log_and_throw(self, err_type: type[Exception], err_msg: str) -> None:
        if self.logger is not None:
            self.logger.set_error_and_log(f"{err_type}: {err_msg}")
        raise err_type(err_msg)

    # -- forward --------------------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Forward passes in this block, and their backward, keep gradients local; the next one outside reduces all."""
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        with span("DistributedDataParallel.forward"):
            inputs, kwargs = self._pre_forward(*inputs, **kwargs)
            output = (
                self.module.forward(*inputs, **kwargs)
                if self._delay_all_reduce_all_params
                else self._run_ddp_forward(*inputs, **kwargs)
            )
            return self._post_forward(output)

    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        # On torch's own class: that is where torch.compile looks for the module whose graph it may split.
        engines.forward_begins()
        before = TorchDDP._active_ddp_module
        TorchDDP._active_ddp_module = self
        try:
            return self.module(*inputs, **kwargs)
        except BaseException:
            if self._lowering is not None:  # its own hooks are not called for an interrupt
                self._lowering.restore_stale()
            raise
        finally:
            # Two threads may be in the same module's forward, and leave it in any order: it must not stay there for good.
            TorchDDP._active_ddp_module = None if before is self else before

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not self._lazy_init_ran and not torch.compiler.is_compiling():
            self._lazy_init()
        if self._delay_all_reduce_all_params:
            if self._check_sync_bufs_pre_fwd():
                self._sync_buffers()
            return inputs, kwargs
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            assert self.logger is not None
            self.logger.forward_begins(time.perf_counter_ns())
            self.reducer.prepare_for_forward()
        work = Join.notify_join_context(self)
        if work:
            self.reducer._set_forward_pass_work_handle(work, bool(self._divide_by_initial_world_size))
        if torch.is_grad_enabled():
            self.reducer._rebuild_buckets()
            self._note_rebuilt_buckets()
        if self._check_sync_bufs_pre_fwd():
            self._sync_buffers()
        if self._join_config.enable:
            self._check_global_requires_backward_grad_sync(is_joined_rank=False)
        if self.device_ids:
            device = torch.device(self.device_type, self.device_ids[0])
            return to_device(inputs, device), to_device(kwargs, device)
        return inputs, kwargs

    def _lazy_init(self) -> None:
        self._setup_in_backward_optimizers()
        self._lazy_init_ran = True

    def _setup_in_backward_optimizers(self) -> None:
        if not self._delay_all_reduce_all_params:
            take_over(self._engine, self._module_parameters)

    def _register_fused_optim(
        self, optim: Any, *args: Any, optim_params: Iterable[nn.Parameter] | None = None, **kwargs: Any
    ) -> None:
        """Let backward end in a step of `optim`. It is an ordinary optimizer, stepped when all gradients are averaged."""
        if not (isinstance(optim, type) and issubclass(optim, torch.optim.Optimizer)):
            super()._register_fused_optim(optim, *args, optim_params=optim_params, **kwargs)  # one of torch's own table
            return
        parameters = [slot.parameter for slot in self._engine.slots] if optim_params is None else optim_params
        optimizer = optim(parameters, *args, **kwargs)
        problem = problem_with_parameters(self, optimizer)
        if problem is not None:
            raise problem
        keep(self, StepInBackward(self._engine, optimizer, free_gradients=False))

    def _post_forward(self, output: Any) -> Any:
        if self._delay_all_reduce_all_params:
            self._clear_grad_buffer()
            return output
        if self._check_sync_bufs_post_fwd():
            self._sync_buffers()
        if torch.is_grad_enabled() and contexts.in_use():
            gradients = self._context_gradients()
            gradients.watch()
            if (context := contexts.current()) is not None:
                return self._announce_in_context(gradients, context, output)
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            if not self.require_forward_param_sync:  # a module is slow to set an attribute
                self.require_forward_param_sync = True
            self.reducer.prepare_for_backward(())
            assert self.logger is not None
            self.logger.forward_ended(time.perf_counter_ns())
        else:
            self.require_forward_param_sync = False
            if torch.is_grad_enabled():
                self.reducer.disarm()
        if self.find_unused_parameters and not self.static_graph and self._ddp_sink_clone:
            output = _cloned(output)
        self._clear_grad_buffer()
        return output

    def _context_gradients(self) -> contexts.ContextGradients:
        if self._contexts is None:
            finds_unused = self.find_unused_parameters or self.static_graph
            self._contexts = contexts.make(self._engine, finds_unused=finds_unused, withdraw=self.reducer.withdraw)
            self.reducer.contexts = weakref.ref(self._contexts)
        return self._contexts

    def _announce_in_context(self, gradients: contexts.ContextGradients, context: int, output: Any) -> Any:
        """Backward will run in a context and leave gradients there: what averages them is not the engine."""
        if self._delay_all_reduce_params:
            raise RuntimeError("delay_all_reduce_named_params does not work in a context of distributed autograd")
        self.reducer._check_reducer_finalized()
        syncs = self.require_forward_param_sync = self.require_backward_grad_sync
        output = gradients.forward_ended(context, output, syncs=syncs, divisor=self.reducer.take_divisor())
        assert self.logger is not None
        if syncs:
            self.logger.forward_ended(time.perf_counter_ns())
        return output

    # -- the rest of torch's interface ----------------------------------------------------------------------------

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        assert self.logger is not None
        data = self.logger._get_ddp_logging_data()
        return {**data.strs_map, **data.ints_map}

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        if sample_rate < 1:
            self._log_and_throw(ValueError, "DDP runtime logging sample rate should be equal or greater than 1")
        assert self.logger is not None
        self.logger.set_sample_rate(sample_rate)

    def _set_static_graph(self) -> None:
        if self.static_graph:
            warnings.warn("You've set static_graph to be True, no need to set it again.", stacklevel=2)
            return
        if self._engine.stats.steps:
            self._log_and_throw(
                RuntimeError, "set_static_graph() should be called before training loop starts and after DDP is built."
            )
        self.static_graph = True
        self._static_graph_delay_allreduce_enqueued = False
        if not self._engine.options.static:
            self._engine.set_options(
                engine_options(
                    self._caps,
                    [slot.parameter for slot in self._engine.slots],
                    as_view=self.gradient_as_bucket_view,
                    find_unused=self.find_unused_parameters,
                    static=True,
                    skip_unused=self.skip_all_reduce_unused_params,
                    wire_dtype=self._engine.options.wire_dtype,
                )
            )
        assert self.logger is not None
        self.logger._set_static_graph()
        if self.find_unused_parameters:
            warnings.warn(
                "find_unused_parameters=True has no effect with a static graph: the first iteration shows which parameters "
                "are unused, and that may not change.",
                stacklevel=2,
            )

    def _remove_autograd_hooks(self) -> None:
        self.reducer._remove_autograd_hooks()

    def _check_reducer_finalized(self) -> None:
        self.reducer._check_reducer_finalized()

    def _set_sparse_metadata(self, global_unique_ids: dict[str, torch.Tensor]) -> None:
        self.reducer._set_sparse_metadata(global_unique_ids)

    def _update_process_group(self, new_process_group: Any) -> None:
        """Average over another group from now on. A rank that is not in it keeps its model and does not take part."""
        self._has_rebuilt_buckets = False
        self.reducer._reset_state()
        self._contexts = None  # it sends on the old group
        if isinstance(new_process_group, dist.ProcessGroup):
            self.process_group = new_process_group
            self.reducer._update_process_group(new_process_group)
            self._engine.replace_group(self._group())
            if self._delayed is not None:
                self._delayed.replace_group(new_process_group)

    def _set_ddp_sink_clone(self, val: bool) -> None:
        self._ddp_sink_clone = val


class _WatchedDDP:
    """A DDP that looks for unused parameters: a rank whose loss reached none of them owes its peers a step."""

    def __init__(self, engine: Reducer, reducer: TorchReducer) -> None:
        self.reducer = engine
        self._torch_reducer = reducer

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for slot in self.reducer.slots if (parameter := slot.ref()) is not None]

    def has_changed(self) -> bool:
        return False  # torch's contract: the parameters are those of construction

    def takes_part(self) -> bool:
        return self._torch_reducer.owes_step


def _cloned(output: Any) -> Any:
    """Outputs that a user may write into, as torch's DDP returns them: copies, where autograd made the original."""
    tensors, spec, is_rref = _tree_flatten_with_rref(output)
    if is_rref:
        return output
    fresh = [t.clone() if isinstance(t, torch.Tensor) and t.grad_fn is not None else t for t in tensors]
    return torch.utils._pytree.tree_unflatten(fresh, spec)
