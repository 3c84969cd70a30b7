"""torch on the stand-in: what it must not use, and, where values matter, its kernels done by the CPU.

A CUDA tensor lies in memory of this process, so a CPU tensor can lie in the same place. Every operation is done twice:
as on a GPU, which allocates, picks streams and starts kernels that do nothing; and then on the CPU tensors. What the
latter returns is copied to where the former said its result is.

This hangs on Python's dispatch, which autograd's threads inherit. It does not see what C++ does in threads of its own:
torch's built-in communication hooks divide in such a one, on Gloo.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

torch.sparse.check_sparse_tensor_invariants.disable()
aten = torch.ops.aten
_LEFT_ALONE = {"aten::record_stream", "aten::is_pinned", "aten::_pin_memory", "aten::set_", "aten::resize_"}
_LOW = (torch.bfloat16, torch.float16)
_active: Kernels | None = None


def set_up(*, values: bool) -> None:
    global _active
    torch.backends.cudnn.enabled = False
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    if values:
        _active = Kernels()
        _active.__enter__()


class Kernels(TorchDispatchMode):
    """Lets every operation on CUDA tensors happen, on the CPU, in the same memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given, spec = tree_flatten((args, kwargs or {}))
        on_gpu = any(isinstance(one, torch.Tensor) and one.is_cuda for one in given)
        on_gpu = on_gpu or any(isinstance(one, torch.device) and one.type == "cuda" for one in given)
        name = func._schema.name
        # A sparse tensor's number of entries is the host's to keep: what is done in place to it would be done twice.
        before = {id(one): _same_memory(one).clone() for one in given if _is_sparse(one) and func._schema.is_mutable}
        out = func(*args, **(kwargs or {}))
        if not on_gpu or func.is_view or func.namespace in ("c10d", "prim") or name in _LEFT_ALONE:
            return out
        if name == "aten::_local_scalar_dense" or (name == "aten::copy_" and not given[0].is_cuda):
            return out  # a copy to the host, which has happened, or not yet
        cpu_args, cpu_kwargs = tree_unflatten([before.get(id(one), _on_cpu(one)) for one in given], spec)
        if cpu_kwargs.get("pin_memory"):
            cpu_kwargs = {**cpu_kwargs, "pin_memory": False}
        computed = _compute(func, name, cpu_args, cpu_kwargs, out)
        shown, out_spec = tree_flatten(out)
        inputs = [one for one in given if isinstance(one, torch.Tensor)]
        values = tree_flatten(computed)[0]
        return tree_unflatten([_filled(a, b, inputs) for a, b in zip(shown, values, strict=True)], out_spec)


def _is_sparse(given: Any) -> bool:
    return isinstance(given, torch.Tensor) and given.is_cuda and given.is_sparse


def _on_cpu(given: Any) -> Any:
    if isinstance(given, torch.Tensor) and given.is_cuda:
        return _same_memory(given)
    if isinstance(given, torch.device) and given.type == "cuda":
        return torch.device("cpu")
    if isinstance(given, torch.Generator) and given.device.type == "cuda":
        return torch.default_generator
    return given


def _same_memory(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_sparse:
        indices, values = _same_memory(tensor._indices()), _same_memory(tensor._values())
        coalesced = tensor.is_coalesced()
        return torch.sparse_coo_tensor(indices, values, tensor.shape, is_coalesced=coalesced, check_invariants=False)
    storage = tensor.untyped_storage()
    if not storage.nbytes() or not storage.data_ptr():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    held = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    raw = torch.frombuffer(held, dtype=torch.uint8).untyped_storage()
    same = torch.empty(0, dtype=tensor.dtype, device="cpu").set_(
        raw, tensor.storage_offset(), tensor.shape, tensor.stride()
    )
    same = torch._neg_view(same) if tensor.is_neg() else same
    return torch.conj(same) if tensor.is_conj() else same


def _filled(shown: Any, computed: Any, inputs: list[torch.Tensor]) -> Any:
    """What the operation returns on a GPU, with the values that the CPU found."""
    if not isinstance(shown, torch.Tensor) or not isinstance(computed, torch.Tensor):
        return computed
    if computed.is_sparse:
        made = _on_gpu(computed) if shown.is_cuda else computed
        if not any(shown is one for one in inputs):
            return made
        shown.data = made  # written in place: as many entries as it has now
        return shown
    if not shown.is_cuda:
        if shown.numel() and shown.data_ptr() != computed.data_ptr():
            shown.copy_(computed)
        return shown
    if shown.shape != computed.shape:  # of a size that only values tell
        return _on_gpu(computed)
    memory = shown.untyped_storage().data_ptr()
    written_in_place = any(not one.is_sparse and one.untyped_storage().data_ptr() == memory for one in inputs)
    if shown.numel() and not written_in_place:
        _same_memory(shown).copy_(computed)
    return shown


def _on_gpu(computed: torch.Tensor) -> torch.Tensor:
    if computed.is_sparse:
        indices, values = _on_gpu(computed._indices()), _on_gpu(computed._values())
        coalesced = computed.is_coalesced()
        return torch.sparse_coo_tensor(indices, values, computed.shape, is_coalesced=coalesced, check_invariants=False)
    made = aten.empty_strided(computed.shape, computed.stride(), dtype=computed.dtype, device="cuda")
    if made.numel():
        _same_memory(made).copy_(computed)
    return made


# -- what the CPU does not have, or not in these dtypes ------------------------------------------------------------------


def _compute(func: Any, name: str, args: Any, kwargs: Any, out: Any) -> Any:
    special = _SPECIAL.get(name.removeprefix("aten::"))
    if special is not None:
        return special(func, out, *args, **kwargs)
    try:
        return func(*args, **kwargs)
    except RuntimeError as error:
        if func._schema.is_mutable or "expected scalar type" not in str(error):
            raise type(error)(f"the stand-in's CPU cannot do {name}: {str(error)[:300]}") from None
    # Several dtypes in one, as autocast leaves them: a GPU takes them, and computes in the wider.
    wide_args, wide_kwargs = tree_map(_wide, (args, kwargs))
    return func(*wide_args, **wide_kwargs)


def _wide(given: Any) -> Any:
    return given.float() if isinstance(given, torch.Tensor) and given.dtype in _LOW else given


def _by_channel(x: torch.Tensor) -> tuple[list[int], list[int]]:
    """The dimensions to sum over, and the shape of what is left."""
    return [d for d in range(x.dim()) if d != 1], [1, -1] + [1] * (x.dim() - 2)


def _batch_norm_stats(_: Any, out: Any, x: torch.Tensor, eps: float) -> Any:
    variance, mean = torch.var_mean(_wide(x), _by_channel(x)[0], correction=0)
    return mean, (variance + eps).rsqrt()


def _batch_norm_gather_stats_with_counts(
    _: Any,
    out: Any,
    x: Any,
    means: Any,
    invstds: Any,
    mean: Any,
    variance: Any,
    momentum: float,
    eps: float,
    counts: Any,
) -> Any:
    each = counts.to(means.dtype).view(-1, 1)
    total = each.sum()
    found = (means * each).sum(0) / total
    spread = ((1 / invstds**2 - eps + means**2) * each).sum(0) / total - found**2
    if mean is not None:
        mean.copy_(mean * (1 - momentum) + momentum * found)
    if variance is not None:
        variance.copy_(variance * (1 - momentum) + momentum * spread * total / (total - 1))
    return found, (spread + eps).rsqrt()


def _batch_norm_elemt(_: Any, out: Any, x: Any, weight: Any, bias: Any, mean: Any, invstd: Any, eps: float) -> Any:
    shape = _by_channel(x)[1]
    y = (x.to(mean.dtype) - mean.view(shape)) * invstd.view(shape)
    y = y if weight is None else y * weight.view(shape)
    return (y if bias is None else y + bias.view(shape)).to(x.dtype)


def _batch_norm_backward_reduce(_: Any, out: Any, grad: Any, x: Any, mean: Any, invstd: Any, *rest: Any) -> Any:
    over, shape = _by_channel(x)
    grad = grad.to(mean.dtype)
    summed = grad.sum(over)
    with_x = (grad * (x.to(mean.dtype) - mean.view(shape))).sum(over)
    found = (summed, with_x, with_x * invstd, summed)
    return tuple(None if asked is None else value for asked, value in zip(out, found, strict=True))


def _batch_norm_backward_elemt(
    _: Any, out: Any, grad: Any, x: Any, mean: Any, invstd: Any, weight: Any, summed: Any, with_x: Any, counts: Any
) -> Any:
    shape, num = _by_channel(x)[1], counts.sum().to(mean.dtype)
    factor = invstd if weight is None else invstd * weight
    centred = (x.to(mean.dtype) - mean.view(shape)) * (invstd**2 * with_x / num).view(shape)
    return ((grad.to(mean.dtype) - (summed / num).view(shape) - centred) * factor.view(shape)).to(x.dtype)


def _softmax(func: Any, out: Any, x: torch.Tensor, dim: int, half_to_float: bool) -> Any:
    return func(x.float() if half_to_float else x, dim, False)


def _softmax_backward(func: Any, out: Any, grad: Any, y: Any, dim: int, dtype: torch.dtype) -> Any:
    return func(grad, y, dim, grad.dtype).to(dtype)


def _lstm_cell(_: Any, out: Any, x: Any, h: Any, c: Any, x_bias: Any = None, h_bias: Any = None) -> Any:
    gates = _wide(x) + _wide(h)
    if x_bias is not None:
        gates = gates + _wide(x_bias) + _wide(h_bias)
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    new = f * _wide(c) + i * g
    return o * new.tanh(), new, torch.cat([i, f, g, o], 1)


def _lstm_cell_backward(_: Any, out: Any, grad: Any, grad_c: Any, c: Any, new: Any, kept: Any, has_bias: bool) -> Any:
    i, f, g, o = _wide(kept).chunk(4, 1)
    squashed = _wide(new).tanh()
    through = 0.0 if grad_c is None else _wide(grad_c)
    grad = torch.zeros_like(squashed) if grad is None else _wide(grad)
    through = through + grad * o * (1 - squashed**2)
    gates = [through * g * i * (1 - i), through * _wide(c) * f * (1 - f)]
    gates += [through * i * (1 - g**2), grad * squashed * o * (1 - o)]
    joined = torch.cat(gates, 1)
    return joined, through * f, joined.sum(0) if has_bias else None


def _attention(
    _: Any, out: Any, q: Any, k: Any, v: Any, dropout: float = 0.0, causal: bool = False, *rest: Any, **kw: Any
) -> Any:
    found, log_sums = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout, causal, **_scale_in(kw))
    return (found, log_sums.float(), *out[2:])


def _attention_backward(
    _: Any, out: Any, grad: Any, q: Any, k: Any, v: Any, y: Any, sums: Any, *rest: Any, **kw: Any
) -> Any:
    causal = rest[5]
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, y, sums, 0.0, causal, **_scale_in(kw)
    )


def _scale_in(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {"scale": kwargs["scale"]} if kwargs.get("scale") is not None else {}


_SPECIAL: dict[str, Callable[..., Any]] = {
    "batch_norm_stats": _batch_norm_stats,
    "batch_norm_gather_stats_with_counts": _batch_norm_gather_stats_with_counts,
    "batch_norm_elemt": _batch_norm_elemt,
    "batch_norm_backward_reduce": _batch_norm_backward_reduce,
    "batch_norm_backward_elemt": _batch_norm_backward_elemt,
    "_thnn_fused_lstm_cell": _lstm_cell,
    "_thnn_fused_lstm_cell_backward_impl": _lstm_cell_backward,
    "_softmax": _softmax,
    "_log_softmax": _softmax,
    "_softmax_backward_data": _softmax_backward,
    "_log_softmax_backward_data": _softmax_backward,
    "_scaled_dot_product_flash_attention": _attention,
    "_scaled_dot_product_flash_attention_backward": _attention_backward,
}
