"""Parameters that a rank did not use, in a context: found in the graph, and given zeros where another rank used them.

Nothing can be put into a context from outside of a backward pass. So a parameter that other ranks have used and this one
has not gets its place there by a node behind the module's outputs, whose backward gives it zeros; the average is then
written over them. That has to be known when forward is over: the ranks tell each other what they used at that point.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed.autograd as dist_autograd
from torch.nn.parallel.distributed import _tree_flatten_with_rref, _tree_unflatten_with_rref


def reachable(outputs: Iterable[torch.Tensor], context: int, parameters: Sequence[torch.Tensor]) -> set[int]:
    """Which parameters get a gradient: those from which outputs, or what this process sent in the context, were made."""
    index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
    found = {index_of[id(output)] for output in outputs if id(output) in index_of}
    nodes: list[Any] = [output.grad_fn for output in outputs if output.grad_fn is not None]
    nodes += dist_autograd._retrieve_context(context)._send_functions().values()
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) in index_of:
            found.add(index_of[id(variable)])
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
    return found


class _WithZeros(torch.autograd.Function):
    """Passes outputs on; its backward gives zeros to some parameters."""

    @staticmethod
    def forward(ctx: Any, num_outputs: int, sparse: Sequence[bool], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.parameters, ctx.sparse = tensors[num_outputs:], sparse
        return tuple(tensor.view_as(tensor) for tensor in tensors[:num_outputs])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        zeros = [
            torch.zeros_like(parameter, layout=torch.sparse_coo if sparse else torch.strided)
            for parameter, sparse in zip(ctx.parameters, ctx.sparse, strict=True)
        ]
        return (None, None, *gradients, *zeros)


def with_zeros_for(output: Any, parameters: Sequence[torch.Tensor], sparse: Sequence[bool]) -> Any:
    """The output, tied to these parameters."""
    leaves, spec, is_rref = _tree_flatten_with_rref(output)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if not places:
        return output
    tied = _WithZeros.apply(len(places), tuple(sparse), *[leaves[place] for place in places], *parameters)
    for place, tensor in zip(places, tied, strict=True):
        leaves[place] = tensor
    return _tree_unflatten_with_rref(leaves, spec, is_rref)
