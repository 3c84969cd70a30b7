"""One bucket: a flat buffer, a view of it per parameter, and a lifecycle with one guard."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from enum import Enum

import torch

from phalanx.comm.group import Group, Work
from phalanx.errors import ReducerStateError
from phalanx.reducer.plan import BucketSpec, ParameterSpec
from phalanx.reducer.spread import spread_of
from phalanx.reducer.streams import FillStreams

_grad = operator.attrgetter("grad")


class BucketState(Enum):
    """In the order in which a bucket goes through them."""

    def __init__(self, shown: str) -> None:
        self.shown = shown
        self.place = len(type(self).__members__)

    FILLING = "filling"
    READY = "ready"
    IN_FLIGHT = "in flight"
    REDUCED = "reduced"


class ParameterSlot:
    """A parameter's place in a bucket, and what has arrived for it in this step."""

    __slots__ = (
        "bucket",
        "dirty",
        "expected",
        "hot",
        "in_use",
        "index",
        "late",
        "left",
        "name",
        "ref",
        "room",
        "seen",
        "shown",
        "spread",
        "stale",
        "sticky",
        "stream",
        "view",
    )

    def __init__(self, index: int, name: str, parameter: torch.nn.Parameter) -> None:
        self.index = index
        self.name = name
        # Weak, because the parameter's hook leads here: autograd's hooks are not seen by the garbage collector, and a
        # circle through one would never be freed.
        self.ref = weakref.ref(parameter)
        self.spread = spread_of(parameter)  # None for a plain one, of which this rank holds all
        self.bucket: Bucket
        self.view: torch.Tensor
        # What users see as .grad: the same memory, another object, as they may point it elsewhere (`p.grad.data = …`).
        self.shown: torch.Tensor
        self.expected = 1  # arrivals in a backward pass, as far as earlier passes tell
        self.left = 1  # arrivals still to come in this pass
        self.seen = 0  # arrivals in this pass
        self.hot = False  # whether the next arrival is the plain case: the first and only one
        self.sticky = False  # was once predicted unused and came all the same: wait for it from now on
        self.stream = 0  # on a GPU: in which its gradient came, when the order of arrival was recorded
        self.in_use = 0  # and how much memory was then in use
        self.room = 0  # how far that was below the peak, in bytes
        self.dirty = False  # holds a gradient that no reduction has seen
        self.late: torch.Tensor | None = None  # came after the bucket had left: for a second round
        self.stale: torch.Tensor | None = None  # the gradient that was there before, not of this pass

    @property
    def parameter(self) -> torch.nn.Parameter:
        parameter = self.ref()
        if parameter is None:
            raise ReducerStateError("the parameter no longer exists: its module let it go", parameters=[self.name])
        return parameter

    @property
    def gradient(self) -> torch.Tensor | None:
        """What lies in ``.grad``; of one that is spread this rank's part, after it was laid out as its parameter is."""
        parameter = self.parameter
        gradient = parameter.grad
        if self.spread is None or gradient is None:
            return gradient
        fitted = self.spread.fitted(gradient, parameter)
        if fitted is not gradient:
            parameter.grad = fitted
        return self.spread.part(fitted)

    def part(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's part of the parameter, or of a gradient that is laid out like it."""
        return tensor if self.spread is None else self.spread.part(tensor)

    def show(self) -> torch.Tensor:
        """Make what users are to see of the slot's place in its bucket."""
        # Not `detach`: that shares the version of the whole bucket, and by its own version it is told whether this
        # parameter's gradient was added to.
        own = self.view.data
        return own if self.spread is None else self.spread.like(own, self.parameter)

    def start_step(self, *, certain: bool) -> None:
        # Predicted unused only where a wrong guess can be mended: an old gradient would be added to in flight.
        expected = self.expected
        if expected == 0 and not certain and (self.sticky or self.parameter.grad is not None):
            expected = 1
        self.left = expected
        self.hot = expected == 1 and self.bucket.takes_hot
        self.seen = 0
        self.late = None
        self.stale = None


class Bucket:
    """Gradients on their way. The buffer ends in a tail of `num_extra` numbers that are reduced with it."""

    def __init__(
        self,
        spec: BucketSpec,
        specs: Sequence[ParameterSpec],
        group: Group,
        *,
        num_extra: int = 0,
        wire_dtype: torch.dtype | None = None,
    ) -> None:
        self.spec = spec
        self.index = spec.index
        # Whether the plain arrival may be the short one: on a GPU the stream has to be looked at.
        self.takes_hot = spec.device.type == "cpu" and not spec.sparse
        self.state = BucketState.FILLING
        self.slots: list[ParameterSlot] = []
        self.individual: list[ParameterSlot] = []
        """Slots that are looked at one by one; the others are looked at in runs."""
        self.pending = 0
        self.streams = FillStreams(spec.device)
        self.work: Work | None = None
        # Kept until the next: if Gloo's thread were the last to let go of a work, and the interpreter was just ending,
        # freeing the tensors in it would abort the process.
        self.finished: Work | None = None
        self.sparse_sum: Callable[[], torch.Tensor] | None = None
        self.buffer = group.allocate(0 if spec.sparse else spec.numel + num_extra, spec.dtype, spec.device)
        self.gradients = self.buffer[: spec.numel] if num_extra else self.buffer
        self.tail = self.buffer[spec.numel :] if num_extra else None
        # Where the gradients travel in another dtype than they are kept in.
        casts = wire_dtype not in (None, spec.dtype) and spec.dtype.is_floating_point and not spec.sparse
        self.wire = group.allocate(spec.numel, wire_dtype, spec.device) if casts and wire_dtype else None
        # The factor as a tensor: half the cost of a Python number per multiplication. Never in less than single
        # precision: a third in bfloat16 is off by 0.2 %, and always to the same side.
        real = spec.dtype.to_real() if spec.dtype.is_complex else spec.dtype
        self.scale = torch.ones((), dtype=torch.promote_types(real, torch.float32), device="cpu")
        self._factor = 1.0
        self.views = (
            []
            if spec.sparse
            else [
                gradient_view(self.gradients, offset, specs[index])
                for offset, index in zip(spec.offsets, spec.parameters, strict=True)
            ]
        )

    def advance(self, to: BucketState) -> None:
        """The one guard: a bucket is filled, then ready, then in flight, then reduced."""
        if to.place != self.state.place + 1:
            raise ReducerStateError(
                f"a bucket that is {self.state.shown} cannot become {to.shown}",
                bucket=self.index,
                parameters=[slot.name for slot in self.slots],
            )
        self.state = to

    def multiply_by(self, factor: float) -> None:
        """What gradients are multiplied with on their way in, from now on."""
        if factor != self._factor:
            self._factor = factor
            self.scale.fill_(factor)

    def start_step(self) -> None:
        self.state = BucketState.FILLING
        self.pending = len(self.slots)
        if self.individual:
            self.pending -= sum(slot.left <= 0 for slot in self.individual)
        self.work = None
        self.sparse_sum = None


def gradients_of(refs: Sequence[weakref.ref[torch.nn.Parameter]]) -> list[torch.Tensor | None]:
    """What lies in ``.grad``, of each. A parameter that is gone has none."""
    try:
        return list(map(_grad, map(operator.call, refs)))
    except AttributeError:
        return [getattr(ref(), "grad", None) for ref in refs]


def gradient_view(flat: torch.Tensor, offset: int, spec: ParameterSpec) -> torch.Tensor:
    """A gradient's place in the buffer, laid out in memory as its parameter is (channels-last stays channels-last)."""
    piece = flat[offset : offset + spec.numel]
    if _is_dense(spec):
        return piece.as_strided(spec.shape, spec.stride, piece.storage_offset())
    return piece.view(spec.shape)


def _is_dense(spec: ParameterSpec) -> bool:
    """Whether the strides name each of the first `numel` places exactly once."""
    expected = 1
    for length, stride in sorted(
        ((n, s) for n, s in zip(spec.shape, spec.stride, strict=True) if n != 1), key=lambda pair: pair[1]
    ):
        if stride != expected:
            return False
        expected *= length
    return spec.numel > 0
