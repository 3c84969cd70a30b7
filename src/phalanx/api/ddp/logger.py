"""What `_get_ddp_logging_data` returns: how a DDP module was made and how its steps went, under torch's keys."""

from __future__ import annotations

import os
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


@dataclass
class LoggingData:
    """Two maps, as torch's C++ logger hands them out."""

    strs_map: dict[str, str] = field(default_factory=dict)
    ints_map: dict[str, int] = field(default_factory=dict)


class Logger:
    """Collects logging data for one DDP module. Step times are those of the step before the forward that samples them."""

    def __init__(self, engine: Reducer) -> None:
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
        if number and (number <= _ALWAYS_SAMPLED or number % self._sample_rate == 0):
            self._sample(number)
        self._forward_began_ns = now_ns

    def forward_ended(self, now_ns: int) -> None:
        self._forward_ended_ns = now_ns

    def _sample(self, number: int) -> None:
        times, ints, strs = self._engine.stats.times, self._data.ints_map, self._data.strs_map
        if times.finalized_ns < self._forward_ended_ns:
            return  # that forward was not followed by a synchronised backward
        durations = {
            "forward_compute_time": self._forward_ended_ns - self._forward_began_ns,
            "backward_compute_time": times.backward_end_ns - self._forward_ended_ns,
            "backward_comm_time": times.finalized_ns - times.first_launch_ns,
            "backward_compute_comm_overlap_time": max(times.backward_end_ns - times.first_launch_ns, 0),
        }
        self._num_sampled += 1
        for key, duration in durations.items():
            ints[key] = duration
            mean = ints.get(f"avg_{key}", 0)
            ints[f"avg_{key}"] = mean + (duration - mean) // self._num_sampled
        ints["forward_compute_time_start"] = self._forward_began_ns
        ints["backward_compute_time_start"] = self._forward_ended_ns
        ints["backward_compute_time_end"] = times.backward_end_ns
        ints["backward_comm_time_start"] = times.first_launch_ns
        ints["backward_comm_time_end"] = times.finalized_ns
        ints["iteration"] = number
        unused = [slot for slot in self._engine.slots if slot.expected == 0]
        ints["unused_parameter_size"] = sum(s.parameter.numel() * s.parameter.element_size() for s in unused)
        strs["prev_iteration_grad_ready_order_indices"] = ", ".join(
            str(index) for index in self._engine.planner.arrival_order
        )

    # -- read by the user -----------------------------------------------------------------------------------------

    def _bucket_bytes(self) -> list[int]:
        return [bucket.spec.num_bytes for bucket in self._engine.buckets]

    def _bucket_sizes(self) -> str:
        return ", ".join(str(size) for size in self._bucket_bytes())

    def _get_ddp_logging_data(self) -> LoggingData:
        strs, ints = self._data.strs_map, self._data.ints_map
        stats = self._engine.stats
        ints["num_buckets_reduced"] = stats.buckets_launched
        ints.setdefault("has_rebuilt_buckets", 0)
        if self._engine.planner.has_replanned:
            ints["has_rebuilt_buckets"] = 1
            strs["rebuilt_bucket_sizes"] = self._bucket_sizes()
            strs["rebuilt_per_bucket_param_indices"] = ", ".join(
                " ".join(str(index) for index in bucket.spec.parameters) for bucket in self._engine.buckets
            )
        return self._data
