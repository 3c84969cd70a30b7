"""What `_get_ddp_logging_data` returns: how a DDP module was made and how its steps went, under torch's keys."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from phalanx.reducer.reducer import Reducer

if TYPE_CHECKING:
    from phalanx.api.ddp.module import DistributedDataParallel

_DTYPE_NAMES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
    torch.complex64: "c10::complex<float>",
    torch.complex128: "c10::complex<double>",
}
_ALWAYS_SAMPLED = 10

logger = logging.getLogger(__name__)


@dataclass
class LoggingData:
    """Two maps, as torch's C++ logger hands them out."""

    strs_map: dict[str, str] = field(default_factory=dict)
    ints_map: dict[str, int] = field(default_factory=dict)


class Logger(dist.Logger):
    """Collects logging data for one DDP module.

    It is one of torch's for functions that take one (and note their errors in it), which needs a reducer of torch's: an
    idle one, of a parameter and a group of its own.

    As with torch, what is known of steps is of the step before the forward that samples it: the first ten, then one in a
    hundred (or what `_set_ddp_runtime_logging_sample_rate` says). Under TORCH_DISTRIBUTED_DEBUG the data go to Python's
    log as well, at level INFO: those of construction, and with DETAIL every sample.
    """

    def __init__(self, engine: Reducer) -> None:
        nobody = dist.ProcessGroup(0, 1)  # type: ignore[call-arg]  # without a store: it never communicates
        idle = dist.Reducer([torch.nn.Parameter(torch.zeros(1, device="cpu"))], [[0]], [1], nobody)
        super().__init__(idle)
        self._idle = idle
        self._engine = engine
        self._data = LoggingData()
        self._num_forwards = 0
        self._num_sampled = 0
        self._sample_rate = 100
        self._forward_began_ns = 0
        self._forward_ended_ns = 0

    # -- said by the module ---------------------------------------------------------------------------------------

    def set_construction_data(self, ddp: DistributedDataParallel, *, has_sync_bn: bool) -> None:
        strs, ints = self._data.strs_map, self._data.ints_map
        parameters = [slot.parameter for slot in self._engine.slots]
        group = ddp.process_group
        backend = dist.get_backend(group)
        strs["module_name"] = type(ddp.module).__name__
        strs["device_ids"] = ", ".join(str(index) for index in ddp.device_ids or ())
        strs["backend_name"] = str(backend)
        strs["dtypes"] = ", ".join(sorted({_DTYPE_NAMES.get(p.dtype, str(p.dtype)) for p in parameters}))
        strs["bucket_sizes"] = self._bucket_sizes()
        ints["output_device"] = -1 if ddp.output_device is None else int(ddp.output_device)
        ints["broadcast_buffers"] = int(ddp.forward_sync_buffers)
        ints["has_sync_bn"] = int(has_sync_bn)
        ints["world_size"] = group.size()
        ints["rank"] = group.rank()
        ints["bucket_cap_bytes"] = ddp.bucket_bytes_cap
        ints["find_unused_parameters"] = int(ddp.find_unused_parameters)
        ints["gradient_as_bucket_view"] = int(ddp.gradient_as_bucket_view)
        ints["iteration"] = 0
        ints["is_multi_device_module"] = int(ddp.is_multi_device_module)
        ints["num_parameter_tensors"] = len(parameters)
        ints["total_parameter_size_bytes"] = sum(p.numel() * p.element_size() for p in parameters)
        self._note_environment(str(backend))
        if dist.get_debug_level() != dist.DebugLevel.OFF:
            logger.info("rank %d: DDP initialised with\n%s", ints["rank"], self._listed())

    def _note_environment(self, backend: str) -> None:
        def env(name: str) -> str:
            return os.environ.get(name, "N/A")

        strs, ints = self._data.strs_map, self._data.ints_map
        for name in ("master_port", "master_addr", "torch_distributed_debug", "cuda_visible_devices"):
            strs[name] = env(name.upper())
        if backend == "gloo":
            strs["gloo_socket_ifname"] = env("GLOO_SOCKET_IFNAME")
            strs["gloo_device_transport"] = env("GLOO_DEVICE_TRANSPORT")
            ints["gloo_num_threads"] = 2
        elif backend == "nccl":
            for name in ("nccl_socket_ifname", "nccl_debug", "nccl_nthreads", "nccl_ib_timeout"):
                strs[name] = env(name.upper())
            strs["nccl_blocking_wait"] = env("TORCH_NCCL_BLOCKING_WAIT")
            strs["nccl_async_error_handling"] = env("TORCH_NCCL_ASYNC_ERROR_HANDLING")

    def set_error_and_log(self, message: str) -> None:
        self._data.strs_map["error"] = message
        self._data.ints_map["has_error"] = 1
        self._data.ints_map["iteration"] = self._num_forwards

    def _set_comm_hook_name(self, name: str) -> None:
        self._data.strs_map["comm_hook"] = name

    def _set_uneven_input_join(self) -> None:
        self._data.ints_map["join_uneven_inputs"] = 1

    def _set_static_graph(self) -> None:
        self._data.ints_map["static_graph"] = 1

    def set_sample_rate(self, rate: int) -> None:
        self._sample_rate = rate

    # -- times ----------------------------------------------------------------------------------------------------

    def forward_begins(self, now_ns: int) -> None:
        """Sample the step before, where this forward is one to sample."""
        number, self._num_forwards = self._num_forwards, self._num_forwards + 1
        if number and self._is_sampled(number):
            self._sample(number)
        self._forward_began_ns, self._forward_ended_ns = now_ns, 0

    def forward_ended(self, now_ns: int) -> None:
        self._forward_ended_ns = now_ns

    def _is_sampled(self, number: int) -> bool:
        return number <= _ALWAYS_SAMPLED or number % self._sample_rate == 0

    def _sample(self, number: int) -> None:
        strs, ints, stats = self._data.strs_map, self._data.ints_map, self._engine.stats
        self._num_sampled += 1
        ints["iteration"] = number
        self._sample_times()
        ints["num_buckets_reduced"] = stats.buckets_launched
        ints["has_rebuilt_buckets"] = int(self._engine.planner.has_replanned)
        if self._engine.planner.has_replanned:
            strs["rebuilt_bucket_sizes"] = self._bucket_sizes()
            strs["rebuilt_per_bucket_param_indices"] = ", ".join(
                " ".join(str(index) for index in bucket.spec.parameters) for bucket in self._engine.buckets
            )
        unused = [slot for slot in self._engine.slots if slot.expected == 0]
        ints["unused_parameter_size"] = sum(s.parameter.numel() * s.parameter.element_size() for s in unused)
        strs["prev_iteration_grad_ready_order_indices"] = ", ".join(
            str(index) for index in self._engine.planner.arrivals or self._engine.planner.arrival_order
        )
        ints["can_set_static_graph"] = int(stats.graph_is_static)
        if number == 1 and ints["find_unused_parameters"]:
            self._tell_of_unused([slot.name for slot in unused])
        if dist.get_debug_level() == dist.DebugLevel.DETAIL:
            logger.info("rank %d: iteration %d\n%s", ints["rank"], number, self._listed())

    def _sample_times(self) -> None:
        """In nanoseconds since the epoch, as torch has them; zero for what did not take place."""
        ints, times = self._data.ints_map, self._engine.stats.times
        began, ended = self._forward_began_ns, self._forward_ended_ns
        backward_end, launch, final = (
            at if 0 < ended <= at else 0 for at in (times.backward_end_ns, times.first_launch_ns, times.finalized_ns)
        )
        durations = {
            "forward_compute_time": ended - began if ended else 0,
            "backward_compute_time": backward_end - ended if backward_end else 0,
            "backward_comm_time": final - launch if final and launch else 0,
            "backward_compute_comm_overlap_time": max(backward_end - launch, 0) if launch else 0,
        }
        for key, duration in durations.items():
            ints[key] = duration
            mean = ints.get(f"avg_{key}", 0)
            ints[f"avg_{key}"] = mean + (duration - mean) // self._num_sampled
        epoch_ns = time.time_ns() - time.perf_counter_ns()
        for key, at in (
            ("forward_compute_time_start", began),
            ("backward_compute_time_start", ended),
            ("backward_compute_time_end", backward_end),
            ("backward_comm_time_start", launch),
            ("backward_comm_time_end", final),
        ):
            ints[key] = at + epoch_ns if at else 0

    def _tell_of_unused(self, names: list[str]) -> None:
        if not names:
            logger.warning(
                "find_unused_parameters=True, and the first step of %s used every parameter. If that is so in every step, "
                "leave the flag off: with it, buckets are not laid out in the order in which gradients arrive",
                self._engine.name,
            )
        elif dist.get_debug_level() != dist.DebugLevel.OFF:
            logger.info("rank %d: unused in the first step: %s", self._data.ints_map["rank"], ", ".join(names))

    # -- read by the user -----------------------------------------------------------------------------------------

    def _bucket_bytes(self) -> list[int]:
        return [bucket.spec.num_bytes for bucket in self._engine.buckets]

    def _bucket_sizes(self) -> str:
        return ", ".join(str(size) for size in self._bucket_bytes())

    def _listed(self) -> str:
        data = {**self._data.strs_map, **self._data.ints_map}
        return "\n".join(f"  {key}: {data[key]}" for key in sorted(data))

    def _get_ddp_logging_data(self) -> LoggingData:  # type: ignore[override]  # torch's own class cannot be made
        noted = super()._get_ddp_logging_data().strs_map.get("error")
        if noted and not self._data.ints_map.get("has_error"):
            self.set_error_and_log(noted)
        return self._data
