"""The collective methods by the names that c10d calls them, turned into blocking calls that the engine runs.

Newer torch calls `all_gather_single`, `reduce_scatter_single` and `all_to_all_single` what older torch calls
`_allgather_base`, `_reduce_scatter_base` and `alltoall_base`; both names are here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

from phalanx.comm.shm import arguments, kernels, sparse
from phalanx.comm.shm.arguments import ArgumentError, Landing, as_bytes, count, cut, dense, one, readable, same_dtype
from phalanx.comm.shm.local import Collectives
from phalanx.comm.shm.wire import signature
from phalanx.comm.shm.work import ShmWork


class Operations:
    """Mixed into the process group, which provides `_run`, `_elsewhere`, and `_ops`."""

    _ops: Collectives

    def rank(self) -> int:
        raise NotImplementedError

    def size(self) -> int:
        raise NotImplementedError

    def _run(self, name: str, act: Callable[[float], None], opts: Any, *, inputs: list[Tensor], result: Any) -> ShmWork:
        raise NotImplementedError

    def _elsewhere(self, method: str, tensor: Tensor, *args: Any) -> Any:
        """For a tensor of an accelerator: what its own group's method returns."""
        raise NotImplementedError

    # ---- reductions ------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, *_: Any) -> Any:
        opts = opts if opts is not None else AllreduceOptions()
        if isinstance(tensors, Tensor):
            tensors = [tensors]
        if isinstance(opts, torch.distributed.ReduceOp | torch.distributed.ReduceOp.RedOpType):
            asked, opts = opts, AllreduceOptions()
            opts.reduceOp = asked
        tensor = tensors[0]
        if tensor.is_cuda:
            return self._elsewhere("allreduce", tensor, tensors, opts)
        op = kernels.operation(opts.reduceOp)
        if tensor.layout is not torch.strided:
            return self._allreduce_sparse(tensors, op, opts)
        tensor = one(tensors, "all_reduce")
        kernels.check(op, tensor.dtype)
        said = signature("all_reduce", tensors=(tensor,), op=op)

        def act(timeout_s: float) -> None:
            place = Landing(tensor, filled=True)
            self._ops.all_reduce(place.flat, op, timeout_s=timeout_s, signature=said)
            place.land()

        return self._run("all_reduce", act, opts, inputs=tensors, result=tensors)

    def _allreduce_sparse(self, tensors: list[Tensor], op: str, opts: Any) -> ShmWork:
        if op != "sum" or len(tensors) != 1 or tensors[0].layout is not torch.sparse_coo:
            raise ArgumentError(f"all_reduce of sparse tensors: only SUM of one COO tensor, got {op} of {len(tensors)}")
        tensor = tensors[0]

        def act(timeout_s: float) -> None:
            sparse.all_reduce(self._ops, tensor, self.rank(), self.size(), timeout_s=timeout_s)

        return self._run("sparse_all_reduce", act, opts, inputs=tensors, result=tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Any:
        opts = opts if opts is not None else AllreduceCoalescedOptions()
        if not tensors:
            raise ArgumentError("all_reduce_coalesced: expected at least one tensor, got none")
        if tensors[0].is_cuda:
            return self._elsewhere("allreduce_coalesced", tensors[0], tensors, opts)
        op = kernels.operation(opts.reduceOp)
        same_dtype(tensors, "all_reduce_coalesced")
        kernels.check(op, dense(tensors[0], "all_reduce_coalesced").dtype)
        said = signature("all_reduce_coalesced", tensors=tuple(tensors), op=op)

        def act(timeout_s: float) -> None:
            packed = torch.cat([readable(t) for t in tensors])
            self._ops.all_reduce(packed, op, timeout_s=timeout_s, signature=said)
            parts = packed.split([t.numel() for t in tensors])
            for t, flat in zip(tensors, parts, strict=True):
                t.detach().copy_(flat.view(t.shape))

        # torch's profiler tests look for this name, as Gloo has it
        return self._run("all_reduce", act, opts, inputs=tensors, result=tensors)

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        opts = opts if opts is not None else ReduceOptions()
        if tensors[0].is_cuda:
            return self._elsewhere("reduce", tensors[0], tensors, opts)
        tensor, op, root = one(tensors, "reduce"), kernels.operation(opts.reduceOp), opts.rootRank
        kernels.check(op, tensor.dtype)
        said = signature("reduce", tensors=(tensor,), op=op, root=root)

        def act(timeout_s: float) -> None:
            place = Landing(tensor, filled=True)
            self._ops.reduce(place.flat, op, root, timeout_s=timeout_s, signature=said)
            if self.rank() == root:
                place.land()

        return self._run("reduce", act, opts, inputs=tensors, result=tensors)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None, *_: Any) -> Any:
        opts = opts if opts is not None else ReduceScatterOptions()
        if outputs[0].is_cuda:
            return self._elsewhere("reduce_scatter", outputs[0], outputs, inputs, opts)
        output, parts = one(outputs, "reduce_scatter"), inputs[0]
        count(len(parts), self.size(), "reduce_scatter", "input tensors")
        act = self._reduce_scatter_act("reduce_scatter", output, parts, opts)
        return self._run("reduce_scatter", act, opts, inputs=parts, result=outputs)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        opts = opts if opts is not None else ReduceScatterOptions()
        if output.is_cuda:
            return self._elsewhere("_reduce_scatter_base", output, output, input, opts)
        act = self._reduce_scatter_act("reduce_scatter_tensor", output, self._parts_of(input, output), opts)
        return self._run("_reduce_scatter_base", act, opts, inputs=[input], result=[output])

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        opts = opts if opts is not None else ReduceScatterOptions()
        if outputs[0].is_cuda:
            return self._elsewhere("reduce_scatter_tensor_coalesced", outputs[0], outputs, inputs, opts)
        count(len(inputs), len(outputs), "reduce_scatter_tensor_coalesced", "inputs, as there are outputs")
        acts = [
            self._reduce_scatter_act("reduce_scatter_tensor_coalesced", o, self._parts_of(i, o), opts)
            for o, i in zip(outputs, inputs, strict=True)
        ]
        return self._run("reduce_scatter_tensor_coalesced", _in_turn(acts), opts, inputs=inputs, result=outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _parts_of(self, input: Tensor, output: Tensor) -> list[Tensor]:
        if input.numel() != output.numel() * self.size():
            raise ArgumentError(
                f"reduce_scatter_tensor: expected an input of {output.numel()} x {self.size()} elements (output x "
                f"world size), got {input.numel()}"
            )
        flat = readable(input)
        return list(flat.view(self.size(), -1).unbind()) if output.numel() else [flat] * self.size()

    def _reduce_scatter_act(
        self, name: str, output: Tensor, parts: Sequence[Tensor], opts: Any
    ) -> Callable[[float], None]:
        op = kernels.operation(opts.reduceOp)
        dense(output, name)
        same_dtype([output, *parts], name)
        kernels.check(op, output.dtype)
        own = parts[self.rank()]
        if own.numel() != output.numel():
            raise ArgumentError(
                f"{name}: input {self.rank()} has {own.numel()} elements but the output {output.numel()}"
            )
        said = signature(name, op=op, note=f"{output.dtype} {[p.numel() for p in parts]}")

        def act(timeout_s: float) -> None:
            place = Landing(output, filled=False)
            flats = [readable(p) for p in parts]
            self._ops.reduce_scatter(flats, place.flat, op, timeout_s=timeout_s, signature=said)
            place.land()

        return act

    # ---- moving ----------------------------------------------------------------------------------------------

    def broadcast(self, tensors: Any, opts: Any = None, *_: Any) -> Any:
        if isinstance(tensors, Tensor):
            tensors = [tensors]
        if isinstance(opts, int):
            root, opts = opts, BroadcastOptions()
            opts.rootRank = root
        opts = opts if opts is not None else BroadcastOptions()
        if tensors[0].is_cuda:
            return self._elsewhere("broadcast", tensors[0], tensors, opts)
        tensor, root = one(tensors, "broadcast"), opts.rootRank
        said = signature("broadcast", tensors=(tensor,), root=root)

        def act(timeout_s: float) -> None:
            place = Landing(tensor, filled=True)
            self._ops.broadcast(as_bytes(place.flat), root, timeout_s=timeout_s, signature=said)
            if self.rank() != root:
                place.land()

        return self._run("broadcast", act, opts, inputs=tensors, result=tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None, *_: Any) -> Any:
        opts = opts if opts is not None else AllgatherOptions()
        if inputs[0].is_cuda:
            return self._elsewhere("allgather", inputs[0], outputs, inputs, opts)
        act = self._all_gather_act("all_gather", outputs[0], one(inputs, "all_gather"))
        return self._run("all_gather", act, opts, inputs=inputs, result=outputs)

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        """`outputs[rank][i]` gets that rank's `inputs[i]`."""
        opts = opts if opts is not None else AllgatherOptions()
        if inputs[0].is_cuda:
            return self._elsewhere("allgather_coalesced", inputs[0], outputs, inputs, opts)
        count(len(outputs), self.size(), "all_gather_coalesced", "output lists")
        acts = [
            self._all_gather_act("all_gather_coalesced", [outputs[r][i] for r in range(self.size())], tensor)
            for i, tensor in enumerate(inputs)
        ]
        return self._run("all_gather", _in_turn(acts), opts, inputs=inputs, result=outputs)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        opts = opts if opts is not None else AllgatherOptions()
        if output.is_cuda:
            return self._elsewhere("_allgather_base", output, output, input, opts)
        act = self._all_gather_into_act("all_gather_into_tensor", output, input)
        return self._run("_all_gather_base", act, opts, inputs=[input], result=[output])

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        opts = opts if opts is not None else AllgatherOptions()
        if outputs[0].is_cuda:
            return self._elsewhere("allgather_into_tensor_coalesced", outputs[0], outputs, inputs, opts)
        name = "all_gather_into_tensor_coalesced"
        acts = [self._all_gather_into_act(name, o, i) for o, i in zip(outputs, inputs, strict=True)]
        return self._run(name, _in_turn(acts), opts, inputs=inputs, result=outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _all_gather_act(self, name: str, outputs: Sequence[Tensor], input: Tensor) -> Callable[[float], None]:
        count(len(outputs), self.size(), name, "output tensors")
        same_dtype([dense(input, name), *outputs], name)
        own = outputs[self.rank()]
        if own.numel() != input.numel():
            raise ArgumentError(f"{name}: output {self.rank()} has {own.numel()} elements, our input {input.numel()}")
        said = signature(name, note=str(input.dtype))

        def act(timeout_s: float) -> None:
            places = [Landing(o, filled=False) for o in outputs]
            flats = [as_bytes(p.flat) for p in places]
            self._ops.all_gather(as_bytes(readable(input)), flats, timeout_s=timeout_s, signature=said)
            for place in places:
                place.land()

        return act

    def _all_gather_into_act(self, name: str, output: Tensor, input: Tensor) -> Callable[[float], None]:
        same_dtype([dense(input, name), dense(output, name)], name)
        if output.numel() != input.numel() * self.size():
            raise ArgumentError(
                f"{name}: expected an output of {input.numel()} x {self.size()} elements (input x world size), got "
                f"{output.numel()}"
            )
        said = signature(name, tensors=(input,))

        def act(timeout_s: float) -> None:
            place = Landing(output, filled=False)
            flats = list(as_bytes(place.flat).view(self.size(), -1).unbind())
            self._ops.all_gather(as_bytes(readable(input)), flats, timeout_s=timeout_s, signature=said)
            place.land()

        return act

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None, *_: Any) -> Any:
        opts = opts if opts is not None else GatherOptions()
        if inputs[0].is_cuda:
            return self._elsewhere("gather", inputs[0], outputs, inputs, opts)
        tensor, root = one(inputs, "gather"), opts.rootRank
        targets = outputs[0] if self.rank() == root else None
        if targets is not None:
            count(len(targets), self.size(), "gather", "output tensors")
            same_dtype([tensor, *targets], "gather")
        said = signature("gather", root=root, note=str(tensor.dtype))

        def act(timeout_s: float) -> None:
            places = None if targets is None else [Landing(t, filled=False) for t in targets]
            flats = None if places is None else [as_bytes(p.flat) for p in places]
            self._ops.gather(as_bytes(readable(tensor)), flats, root, timeout_s=timeout_s, signature=said)
            for place in places or ():
                place.land()

        return self._run("gather", act, opts, inputs=inputs, result=targets or [])

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None, *_: Any) -> Any:
        opts = opts if opts is not None else ScatterOptions()
        if outputs[0].is_cuda:
            return self._elsewhere("scatter", outputs[0], outputs, inputs, opts)
        output, root = one(outputs, "scatter"), opts.rootRank
        sources = inputs[0] if self.rank() == root else None
        if sources is not None:
            count(len(sources), self.size(), "scatter", "input tensors")
            same_dtype([output, *sources], "scatter")
        said = signature("scatter", root=root, note=str(output.dtype))

        def act(timeout_s: float) -> None:
            place = Landing(output, filled=False)
            flats = None if sources is None else [as_bytes(readable(s)) for s in sources]
            self._ops.scatter(as_bytes(place.flat), flats, root, timeout_s=timeout_s, signature=said)
            place.land()

        return self._run("scatter", act, opts, inputs=sources or outputs, result=outputs)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None, *_: Any) -> Any:
        opts = opts if opts is not None else AllToAllOptions()
        if outputs[0].is_cuda:
            return self._elsewhere("alltoall", outputs[0], outputs, inputs, opts)
        for tensors in (outputs, inputs):
            count(len(tensors), self.size(), "all_to_all", "tensors")
        same_dtype([*outputs, *inputs], "all_to_all")
        said = signature("all_to_all", note=str(outputs[0].dtype))

        def act(timeout_s: float) -> None:
            places = [Landing(o, filled=False) for o in outputs]
            sources = [as_bytes(readable(i)) for i in inputs]
            self._ops.all_to_all(sources, [as_bytes(p.flat) for p in places], timeout_s=timeout_s, signature=said)
            for place in places:
                place.land()

        return self._run("all_to_all", act, opts, inputs=inputs, result=outputs)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: list[int] | None = None,
        input_splits: list[int] | None = None,
        opts: Any = None,
    ) -> Any:
        opts = opts if opts is not None else AllToAllOptions()
        if output.is_cuda:
            return self._elsewhere("alltoall_base", output, output, input, output_splits, input_splits, opts)
        name = "all_to_all_single"
        same_dtype([dense(output, name), dense(input, name)], name)
        rows_out = arguments.splits(output_splits, self.size(), output.shape[0] if output.dim() else 0, name)
        rows_in = arguments.splits(input_splits, self.size(), input.shape[0] if input.dim() else 0, name)
        said = signature(name, note=str(output.dtype))

        def act(timeout_s: float) -> None:
            place = Landing(output, filled=False)
            targets = [as_bytes(t) for t in cut(place.flat.view(output.shape), rows_out)]
            sources = [as_bytes(t) for t in cut(input.detach().contiguous(), rows_in)]
            self._ops.all_to_all(sources, targets, timeout_s=timeout_s, signature=said)
            place.land()

        return self._run("all_to_all", act, opts, inputs=[input], result=[output])

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None, *_: Any) -> Any:
        opts = opts if opts is not None else BarrierOptions()
        said = signature("barrier")

        def act(timeout_s: float) -> None:
            self._ops.barrier(timeout_s=timeout_s, signature=said)

        return self._run("barrier", act, opts, inputs=[], result=[])


def _in_turn(acts: Sequence[Callable[[float], None]]) -> Callable[[float], None]:
    def act(timeout_s: float) -> None:
        for each in acts:
            each(timeout_s)

    return act
