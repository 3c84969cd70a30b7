"""`replicate(precision=)`: the same numbers as one process that casts by hand, and a module that is as before."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from tests.ranks.precise import BF16, FP16, Normed, squares, train_by_hand
from tests.ranks.replicas import SMALL, batch, equal_on_all_ranks, mlp
from torch import nn
from torch.utils.checkpoint import checkpoint

import phalanx as px
from phalanx.testing import ranks

POLICIES = {
    "bf16": px.Precision(param_dtype=BF16),
    "bf16 all the way": px.Precision(param_dtype=BF16, reduce_dtype=BF16),
    "fp16 on the wire": px.Precision(reduce_dtype=FP16),
    "bf16, summed in double": px.Precision(param_dtype=BF16, reduce_dtype=torch.float64),
}
both_backends = pytest.mark.parametrize("backend", ["gloo", "phalanx"])


@both_backends
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_same_as_one_process_that_casts(world_size: int, backend: str) -> None:
    @ranks(world_size, backend=backend)
    def body() -> None:
        full = Normed()
        train_by_hand(full, steps=5, dtype=None, wire=None)
        for which, policy in POLICIES.items():
            model = px.replicate(Normed(), precision=policy, **SMALL)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            for step in range(5):
                optimizer.zero_grad(set_to_none=step % 2 == 0)
                squares(model, dist.get_rank(), step).backward()
                assert all(p.grad.dtype is torch.float32 for p in model.parameters())
                optimizer.step()
            reference = Normed()
            train_by_hand(reference, steps=5, dtype=policy.param_dtype, wire=policy.reduce_dtype)
            # Two summands have one order; of three, groups choose. And halving before or after it rounds small float16.
            exact = dist.get_world_size() == 2 and policy.reduce_dtype is not FP16
            close = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-2, "atol": 1e-3}
            for (name, mine), wanted in zip(model.named_parameters(), reference.parameters(), strict=True):
                said = f"{which}, {name}: "
                torch.testing.assert_close(mine, wanted, msg=lambda text, said=said: said + text, **close)
                assert equal_on_all_ranks(mine)
            assert any(not torch.equal(p, q) for p, q in zip(model.parameters(), full.parameters(), strict=True))

    body()


class Seen(Normed):
    """Notes what its forward sees."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = {
            "input": x.dtype,
            "own": self.scale.dtype,
            "child's": self.second.weight.dtype,
            "norm's": self.norm.weight.dtype,
            "normed": self.norm(self.first(x)).dtype,
        }
        return super().forward(x)


@ranks(2)
def test_normalisation_is_kept_full() -> None:
    policy = px.Precision(param_dtype=BF16, keep_full=px.NORM_LAYERS, output_dtype=torch.float32)
    model = px.replicate(Seen(), precision=policy)
    entered: list[torch.dtype] = []
    model.norm.register_forward_pre_hook(lambda _, args: entered.append(args[0].dtype))
    out = model(batch(0))
    assert out.dtype is torch.float32
    assert model.seen == {
        "input": BF16,
        "own": BF16,
        "child's": BF16,
        "norm's": torch.float32,
        "normed": BF16,
    }
    assert entered == [torch.float32, torch.float32]
    out.sum().backward()
    assert all(p.grad.dtype is torch.float32 for p in model.parameters())
    with torch.no_grad():
        by_hand = model.norm(nn.functional.linear(batch(0).to(BF16), *(p.to(BF16) for p in model.first.parameters())))
        wanted = nn.functional.linear(
            torch.tanh(by_hand) * model.scale.to(BF16), *(p.to(BF16) for p in model.second.parameters())
        )
    assert torch.equal(out.detach(), wanted.float())


@pytest.mark.parametrize("kept", ["second", "second.weight"])
@ranks(2)
def test_layers_and_parameters_are_kept_by_name(kept: str) -> None:
    model = px.replicate(Seen(), precision=px.Precision(param_dtype=BF16, keep_full=kept))
    if kept == "second":
        squares(model, 0, 0).backward()
        assert model.seen["child's"] is torch.float32 and model.seen["own"] is BF16
    else:
        with pytest.raises(RuntimeError, match="same dtype"):  # a single operand kept full is the user's own doing
            model(batch(0))
        assert model.seen["child's"] is torch.float32


@ranks(2)
def test_inputs_are_left_alone_on_demand() -> None:
    model = px.replicate(Seen(), precision=px.Precision(param_dtype=BF16, cast_inputs=False))
    with pytest.raises(RuntimeError, match="dtype"):
        model(batch(0))
    assert model.seen["input"] is torch.float32 if hasattr(model, "seen") else True
    assert model(batch(0).to(BF16)).dtype is BF16


@ranks(2)
def test_outside_of_forward_nothing_shows() -> None:
    model = px.replicate(Normed(), precision=POLICIES["bf16"])
    before = {name: (id(p), p.dtype) for name, p in model.named_parameters()}
    loss = squares(model, dist.get_rank(), 0)
    assert {name: (id(p), p.dtype) for name, p in model.named_parameters()} == before
    assert {value.dtype for value in model.state_dict().values()} == {torch.float32}
    loss.backward()
    model.load_state_dict(Normed().state_dict())
    model.eval()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert model(batch(0)).dtype is BF16
    assert {name: (id(p), p.dtype) for name, p in model.named_parameters()} == before


class Failing(Normed):
    error: BaseException | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        if self.error is not None:
            raise self.error
        return self.second(hidden)


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()], ids=["error", "interrupt"])
@ranks(2)
def test_a_forward_that_raises(error: BaseException) -> None:
    model = px.replicate(Failing(), precision=POLICIES["bf16"])
    before = [id(p) for p in model.parameters()]
    model.error = error
    for after in ("state_dict", "forward"):
        with pytest.raises(type(error)):
            model(batch(0))
        if isinstance(error, Exception):
            assert [id(p) for p in model.parameters()] == before
        if after == "state_dict":
            assert {value.dtype for value in model.state_dict().values()} == {torch.float32}
            assert [id(p) for p in model.parameters()] == before
    model.error = None
    squares(model, dist.get_rank(), 0).backward()
    assert [id(p) for p in model.parameters()] == before
    assert model.first.weight.grad is not None and equal_on_all_ranks(model.first.weight.grad)


@ranks(2)
def test_an_interrupt_in_a_part_that_was_called_by_itself() -> None:
    model = px.replicate(Failing(), precision=POLICIES["bf16"])
    handle = model.second.register_forward_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        model.second(torch.ones(1, 8))
    handle.remove()
    squares(model, dist.get_rank(), 0).backward()
    assert all(isinstance(p, nn.Parameter) and p.dtype is torch.float32 for p in model.parameters())
    assert equal_on_all_ranks(model.second.weight.grad)


class Tied(nn.Module):
    """Weights tied, a layer used twice, a call of itself, and submodules called from another method."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.into = nn.Linear(6, 6, bias=False)
        self.out_of = nn.Linear(6, 6, bias=False)
        self.out_of.weight = self.into.weight
        self.again = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, depth: int = 1) -> torch.Tensor:
        assert self.into.weight is self.out_of.weight
        hidden = torch.tanh(self.again(torch.tanh(self.again(self.into(x)))))
        return self(hidden, depth - 1) if depth else self.out_of(hidden)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(self.into(x))


@both_backends
def test_tied_reused_and_nested(backend: str) -> None:
    @ranks(2, backend=backend)
    def body() -> None:
        model = px.replicate(Tied(), precision=POLICIES["bf16 all the way"], **SMALL)
        for step in range(3):
            model.zero_grad()
            loss = squares(model, dist.get_rank(), step)
            assert model.into.weight is model.out_of.weight and isinstance(model.into.weight, nn.Parameter)
            (loss + model.encode(batch(0, step)).float().sum()).backward()
            for parameter in model.parameters():
                assert parameter.grad.dtype is torch.float32 and equal_on_all_ranks(parameter.grad)
        assert model.encode(batch(0)).dtype is BF16
        reference = Tied()
        low = copy.deepcopy(reference).to(BF16)
        torch.testing.assert_close(model(batch(0)), low(batch(0).to(BF16)), rtol=0, atol=0)

    body()


class Checkpointed(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Tanh()) for _ in range(3)])
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.kind == "reentrant") if self.kind else layer(x)
        return x


@pytest.mark.parametrize("keep", [(), px.NORM_LAYERS], ids=["all low", "norms full"])
@ranks(2)
def test_checkpointing_recomputes_in_the_same_precision(keep: tuple) -> None:
    policy = px.Precision(param_dtype=BF16, reduce_dtype=BF16, keep_full=keep)
    models = [px.replicate(Checkpointed(kind), precision=policy) for kind in ("", "reentrant", "other")]
    for step in range(3):
        for model in models:
            model.zero_grad()
            model(batch(dist.get_rank(), step).requires_grad_()).float().square().sum().backward()
        for plain, *recomputed in zip(*(model.parameters() for model in models), strict=True):
            for parameter in recomputed:
                assert isinstance(parameter, nn.Parameter)
                assert torch.equal(plain.grad, parameter.grad)


@both_backends
def test_accumulation_is_in_full_precision(backend: str) -> None:
    """Sixteen gradients under no_sync: their sum has more digits than bfloat16 holds."""

    @ranks(2, backend=backend)
    def body() -> None:
        rank = dist.get_rank()
        model, alone = px.replicate(Normed(), precision=POLICIES["bf16"]), Normed()
        kept: list[torch.Tensor] = []
        from tests.ranks.precise import lowered_gradients

        with px.no_sync(model):
            for step in range(16):
                squares(model, rank, step).backward()
                kept.append(lowered_gradients(alone, rank, step, dtype=BF16)["second.weight"])
                assert model.second.weight.grad.dtype is torch.float32
        local = kept[0]
        for gradient in kept[1:]:
            local = local + gradient
        assert torch.equal(model.second.weight.grad, local)
        assert not torch.equal(local, local.to(BF16).float())
        squares(model, rank, 16).backward()
        assert equal_on_all_ranks(model.second.weight.grad)

    body()


class Partly(Normed):
    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(2, 2)
        self.sometimes = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, use: bool = True) -> torch.Tensor:
        return super().forward(x) + (self.sometimes(x) if use else 0)


@both_backends
def test_unused_and_ignored_parameters_and_weights(backend: str) -> None:
    @ranks(2, backend=backend)
    def body() -> None:
        rank = dist.get_rank()
        model = px.replicate(Partly(), precision=POLICIES["bf16 all the way"], ignore=["second.bias"], **SMALL)
        for step in range(4):
            model.zero_grad()
            px.weight(model, 1 + rank)
            model(batch(rank, step), use=rank == 0).float().square().sum().backward()
            assert model.never.weight.grad is None
            assert model.sometimes.weight.grad.abs().sum() > 0 and equal_on_all_ranks(model.sometimes.weight.grad)
            assert not equal_on_all_ranks(model.second.bias.grad)
            alone = copy.deepcopy(model).to(BF16)
            alone(batch(0, step).to(BF16), use=True).float().square().sum().backward()
            wanted = alone.sometimes.weight.grad.float() / 3
            torch.testing.assert_close(model.sometimes.weight.grad, wanted, rtol=2e-2, atol=2e-2)

    body()


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(13)
        self.into = nn.Linear(6, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("offset", torch.full((4,), 0.1))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("fresh", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = (self.offset.dtype, self.norm.running_mean.dtype, self.calls.dtype)
        self.calls += 1
        hidden = self.norm(self.into(x)) + self.offset
        self.fresh = hidden.detach().mean(0)
        return hidden


@both_backends
@pytest.mark.parametrize("keep", [(), px.NORM_LAYERS], ids=["all low", "norms full"])
def test_buffers_are_cast_in_forward_and_kept_full(keep: tuple, backend: str) -> None:
    @ranks(2, backend=backend)
    def body(keep: tuple) -> None:
        policy = px.Precision(param_dtype=BF16, buffer_dtype=BF16, keep_full=keep)
        model = px.replicate(Counting(), precision=policy)
        statistics = model.norm.running_mean
        for step in range(3):
            model(batch(dist.get_rank(), step)).float().square().sum().backward()
            assert model.seen == (BF16, torch.float32 if keep else BF16, torch.int64)
        dtypes = {name: buffer.dtype for name, buffer in model.named_buffers()}
        assert dtypes.pop("calls") is dtypes.pop("norm.num_batches_tracked") is torch.int64
        assert set(dtypes.values()) == {torch.float32}
        assert model.calls.item() == 3 and model.norm.num_batches_tracked.item() == 3
        assert torch.equal(model.offset, torch.full((4,), 0.1))  # not rounded: nobody wrote to it
        assert model.norm.running_mean.abs().sum() > 0 and model.fresh.abs().sum() > 0
        if dist.get_rank() == 0:
            assert model.norm.running_mean is statistics  # written to in place; other ranks got rank 0's
        for name in ("running_mean", "running_var"):
            assert equal_on_all_ranks(getattr(model.norm, name))
        assert equal_on_all_ranks(model.fresh)

    body(keep)


@ranks(2)
def test_recurrent_layers() -> None:
    torch.manual_seed(5)
    model = px.replicate(nn.LSTM(6, 4, num_layers=2), precision=POLICIES["bf16 all the way"])
    for step in range(3):
        model.zero_grad()
        output, _ = model(batch(dist.get_rank(), step).unsqueeze(1))
        assert output.dtype is BF16
        output.float().square().sum().backward()
        for held, parameter in zip(model._flat_weights, model.parameters(), strict=True):
            assert held is parameter and equal_on_all_ranks(parameter.grad)
    copy.deepcopy(model)


@ranks(2)
def test_copies_are_plain_modules_and_unreplicate_ends_it() -> None:
    model = px.replicate(Normed(), precision=px.Precision(param_dtype=BF16, keep_full=px.NORM_LAYERS))
    squares(model, dist.get_rank(), 0).backward()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin(batch(0)).dtype is torch.float32
        again = px.replicate(twin, precision=POLICIES["bf16"])
        assert again(batch(0)).dtype is BF16
    px.unreplicate(model)
    assert model(batch(0)).dtype is torch.float32
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._state_dict_pre_hooks for m in model.modules())
    px.replicate(model)


@both_backends
def test_ranks_must_give_equal_policies(backend: str) -> None:
    @ranks(2, backend=backend)
    def body() -> None:
        mine = POLICIES["bf16"] if dist.get_rank() == 0 else POLICIES["bf16 all the way"]
        with pytest.raises(px.errors.MismatchError, match=r"computed in torch.bfloat16, reduced in torch.bfloat16"):
            px.replicate(mlp(), precision=mine)
        with pytest.raises(px.errors.MismatchError, match=r"computed in torch.bfloat16"):
            px.replicate(mlp(), precision=POLICIES["bf16"] if dist.get_rank() else None)
        wrong = px.Precision(param_dtype=BF16, keep_full="nowhere" if dist.get_rank() else "0")
        expected = ValueError if dist.get_rank() else px.errors.PeerFailedError
        with pytest.raises(expected, match="keep_full names what the module does not have: nowhere"):
            px.replicate(mlp(), precision=wrong)
        with pytest.raises(TypeError, match=r"precision takes a phalanx.Precision, got dtype"):
            px.replicate(mlp(), precision=BF16)
        px.replicate(mlp(), precision=POLICIES["bf16"])

    body()


@ranks(2)
def test_a_failure_in_backward_and_the_step_after() -> None:
    model = px.replicate(Normed(), precision=POLICIES["bf16 all the way"], **SMALL)
    squares(model, dist.get_rank(), 0).backward()
    loss = squares(model, dist.get_rank(), 1)
    if dist.get_rank() == 1:
        model.first.weight.register_hook(lambda _: (_ for _ in ()).throw(ValueError("mine")))
        with pytest.raises(ValueError, match="mine"):
            loss.backward()
        model.first.weight._backward_hooks.clear()
    else:
        with pytest.raises(px.errors.PeerFailedError, match="rank 1 raised"):
            loss.backward()
    model.zero_grad()
    squares(model, dist.get_rank(), 2).backward()
    assert all(equal_on_all_ranks(p.grad) for p in model.parameters())


@pytest.mark.parametrize("first", ["compiled", "replicated"])
@ranks(2, timeout_s=50)
def test_compiled(first: str) -> None:
    """Either way round. The eager backend: what is asked here is whether the graph gets the casts."""
    rank = dist.get_rank()
    policy, eager = POLICIES["bf16 all the way"], px.replicate(Normed(), precision=POLICIES["bf16 all the way"])
    if first == "compiled":
        run = model = px.replicate(torch.compile(Normed(), backend="eager"), precision=policy)
    else:
        model = px.replicate(Normed(), precision=policy)
        run = torch.compile(model, backend="eager")
    for step in range(2):
        for each in (run, eager):
            each.zero_grad()
            out = each(batch(rank, step))
            assert out.dtype is BF16
            out.float().square().mean().backward()
        for (name, mine), wanted in zip(model.named_parameters(), eager.parameters(), strict=True):
            assert isinstance(mine, nn.Parameter), name
            assert torch.equal(mine.grad, wanted.grad), name
    assert {value.dtype for value in model.state_dict().values()} == {torch.float32}
