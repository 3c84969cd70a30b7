"""The collectives of a group that spans hosts: shared memory inside each host, Gloo between them.

Ranks of the same local index on each host are mates. Each carries its own part over the network: of a reduction, the
chunk that it has reduced for its host; of a gathering, its own bytes. So all local ranks drive the network together
and only reduced bytes cross it. Where hosts have different numbers of ranks, those that every host has are carriers.

Sums are taken over local ranks first, then over hosts, each in order, so every rank gets the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.comm.shm import collectives
from phalanx.comm.shm.all_reduce import chunks
from phalanx.comm.shm.between_hosts import BetweenHosts
from phalanx.comm.shm.kernels import divided, fold
from phalanx.comm.shm.mesh import Mesh

_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")


class HierarchicalCollectives:
    def __init__(self, mesh: Mesh, hosts: list[list[int]], between: BetweenHosts) -> None:
        self._mesh = mesh
        self._hosts = hosts
        self._between = between
        self._rank = mesh.ranks[mesh.index]
        self._size = sum(len(host) for host in hosts)
        self._host = next(h for h, host in enumerate(hosts) if self._rank in host)
        self._num_carriers = min(len(host) for host in hosts)
        self._carries = mesh.index < self._num_carriers
        self._mates = [host[mesh.index] for host in hosts] if self._carries else []
        self._others = [r for r in self._mates if r != self._rank]
        self._host_of = {r: h for h, host in enumerate(hosts) for r in host}
        self._seq = 0

    def _enter(self, signature: bytes, timeout_s: float) -> str:
        """The same call on every host. Local ranks compare their calls by themselves."""
        self._seq += 1
        said = f"{signature.decode()} #{self._seq}"
        self._between.agree(self._others, said, timeout_s=timeout_s)
        return said

    # ---- reductions ------------------------------------------------------------------------------------------

    def barrier(self, *, timeout_s: float, signature: bytes) -> None:
        collectives.barrier(self._mesh, timeout_s=timeout_s, signature=signature)
        self._enter(signature, timeout_s)
        collectives.barrier(self._mesh, timeout_s=timeout_s, signature=signature + b" (hosts agree)")

    def all_reduce(self, flat: Tensor, op: str, *, timeout_s: float, signature: bytes) -> None:
        plain = "sum" if op == "avg" else op
        parts = self._reduce_on_host(flat, plain, timeout_s, signature)
        if self._carries:
            self._reduce_between(parts[self._mesh.index], plain, self._enter(signature, timeout_s), timeout_s)
        else:
            self._enter(signature, timeout_s)
        if op == "avg" and self._carries:
            divided(parts[self._mesh.index], self._size)
        self._share_on_host(parts, timeout_s, signature)

    def _reduce_on_host(self, flat: Tensor, op: str, timeout_s: float, signature: bytes) -> list[Tensor]:
        """Afterwards carrier k's own chunk k of `flat` holds the host's reduction of it. Returns the chunks."""
        cuts = chunks(flat.numel(), self._num_carriers, flat.element_size())
        parts = [flat[a:b] for a, b in cuts] + [flat[:0]] * (self._mesh.size - self._num_carriers)
        own = parts[self._mesh.index]
        collectives.reduce_scatter(self._mesh, parts, own, op, timeout_s=timeout_s, signature=signature)
        return parts

    def _reduce_between(self, chunk: Tensor, op: str, said: str, timeout_s: float) -> None:
        """Each mate reduces its piece of the chunk over the hosts, in their order, and sends it to all."""
        cuts = chunks(chunk.numel(), len(self._hosts), chunk.element_size())
        pieces = {r: chunk[a:b] for r, (a, b) in zip(self._mates, cuts, strict=True)}
        own = pieces[self._rank]
        arrived = {r: torch.empty_like(own) for r in self._others}
        sends = {r: pieces[r].view(torch.uint8) for r in self._others}
        receives = {r: t.view(torch.uint8) for r, t in arrived.items()}
        self._between.swap(sends, receives, timeout_s=timeout_s, said=said)
        if own.numel():
            fold(op, [own if r == self._rank else arrived[r] for r in self._mates], own, self._host)
        results = dict.fromkeys(self._others, own.view(torch.uint8))
        self._between.swap(results, sends, timeout_s=timeout_s, said=said)

    def _share_on_host(self, parts: list[Tensor], timeout_s: float, signature: bytes) -> None:
        targets = [p.view(torch.uint8) for p in parts]
        said = signature + b" (sharing)"
        collectives.all_gather(self._mesh, targets[self._mesh.index], targets, timeout_s=timeout_s, signature=said)

    def reduce(self, flat: Tensor, op: str, root: int, *, timeout_s: float, signature: bytes) -> None:
        plain = "sum" if op == "avg" else op
        total = flat.clone()  # a rank that is not the root keeps what it has
        parts = self._reduce_on_host(total, plain, timeout_s, signature)
        said = self._enter(signature, timeout_s)
        home = self._host_of[root]
        if self._carries:
            own = parts[self._mesh.index]
            mate = self._hosts[home][self._mesh.index]
            if self._host == home:
                arrived = {r: torch.empty_like(own) for r in self._others}
                receives = {r: t.view(torch.uint8) for r, t in arrived.items()}
                self._between.swap({}, receives, timeout_s=timeout_s, said=said)
                if own.numel():
                    fold(plain, [own if r == self._rank else arrived[r] for r in self._mates], own, self._host)
            else:
                self._between.swap({mate: own.view(torch.uint8)}, {}, timeout_s=timeout_s, said=said)
        if self._host == home:
            own = parts[self._mesh.index].view(torch.uint8)
            targets = [p.view(torch.uint8) for p in parts] if self._rank == root else None
            local_root = self._hosts[home].index(root)
            note = signature + b" (to the root)"
            collectives.gather(self._mesh, own, targets, local_root, timeout_s=timeout_s, signature=note)
            if self._rank == root:
                flat.copy_(divided(total, self._size) if op == "avg" else total)

    def reduce_scatter(
        self, inputs: Sequence[Tensor], output: Tensor, op: str, *, timeout_s: float, signature: bytes
    ) -> None:
        """The host's part of what a rank elsewhere gets is summed by one local rank and sent to it."""
        plain = "sum" if op == "avg" else op
        mesh = self._mesh
        total = torch.empty_like(output)
        sums: dict[int, Tensor] = {}
        for h, host in enumerate(self._hosts):
            for start in range(0, len(host), mesh.size):  # ranks of that host, as many at a time as we are here
                targets = host[start : start + mesh.size]
                parts = [inputs[r] for r in targets] + [output.view(-1)[:0]] * (mesh.size - len(targets))
                mine = targets[mesh.index] if mesh.index < len(targets) else None
                if h == self._host:
                    place = total
                else:
                    place = torch.empty_like(inputs[mine]) if mine is not None else output[:0]
                    if mine is not None:
                        sums[mine] = place
                note = signature + f" (for host {h})".encode()
                collectives.reduce_scatter(mesh, parts, place, plain, timeout_s=timeout_s, signature=note)
        said = self._enter(signature, timeout_s)
        place_in_host = self._hosts[self._host].index(self._rank)
        givers = {h: host[place_in_host % len(host)] for h, host in enumerate(self._hosts) if h != self._host}
        arrived = {r: torch.empty_like(total) for r in givers.values()}
        self._between.swap(
            {r: t.view(torch.uint8) for r, t in sums.items()},
            {r: t.view(torch.uint8) for r, t in arrived.items()},
            timeout_s=timeout_s,
            said=said,
        )
        in_order = [total if h == self._host else arrived[givers[h]] for h in range(len(self._hosts))]
        if output.numel():
            fold(plain, in_order, output, 0)
            if op == "avg":
                divided(output, self._size)

    # ---- moving ----------------------------------------------------------------------------------------------

    def broadcast(self, data: Tensor, root: int, *, timeout_s: float, signature: bytes) -> None:
        home = self._host_of[root]
        parts = [data[a:b] for a, b in chunks(data.numel(), self._num_carriers, 16)]
        if self._host == home:
            local_root = self._hosts[home].index(root)
            collectives.broadcast(self._mesh, data, local_root, timeout_s=timeout_s, signature=signature)
        said = self._enter(signature, timeout_s)
        if self._carries:
            own = parts[self._mesh.index]
            if self._host == home:
                self._between.swap(dict.fromkeys(self._others, own), {}, timeout_s=timeout_s, said=said)
            else:
                self._between.swap({}, {self._mates[home]: own}, timeout_s=timeout_s, said=said)
        if self._host != home:
            self._share_on_host(parts + [_NOTHING] * (self._mesh.size - self._num_carriers), timeout_s, signature)

    def all_gather(self, data: Tensor, targets: Sequence[Tensor], *, timeout_s: float, signature: bytes) -> None:
        """Each carrier swaps its own bytes, and those of local ranks that carry nothing, with its mates."""
        mesh, carriers = self._mesh, self._num_carriers
        local = [targets[r] for r in self._hosts[self._host]]
        collectives.all_gather(mesh, data, local, timeout_s=timeout_s, signature=signature)
        said = self._enter(signature, timeout_s)
        carried = [
            [[r for i, r in enumerate(host) if i % carriers == k] for host in self._hosts] for k in range(carriers)
        ]

        def joined(ranks: list[int]) -> Tensor:
            return targets[ranks[0]] if len(ranks) == 1 else torch.cat([targets[r] for r in ranks])

        loads: list[Tensor] = []
        for k in range(carriers):
            sizes = [sum(targets[r].numel() for r in ranks) for h, ranks in enumerate(carried[k]) if h != self._host]
            loads.append(torch.empty(sum(sizes), dtype=torch.uint8, device="cpu"))
        if self._carries:
            own = joined(carried[mesh.index][self._host])
            at, receives = 0, {}
            for h, ranks in enumerate(carried[mesh.index]):
                if h != self._host:
                    size = sum(targets[r].numel() for r in ranks)
                    receives[self._mates[h]] = loads[mesh.index][at : at + size]
                    at += size
            self._between.swap(dict.fromkeys(self._others, own), receives, timeout_s=timeout_s, said=said)
        self._share_on_host(loads + [_NOTHING] * (mesh.size - carriers), timeout_s, signature)
        for k, load in enumerate(loads):
            at = 0
            for r in [r for h, ranks in enumerate(carried[k]) if h != self._host for r in ranks]:
                targets[r].copy_(load[at : at + targets[r].numel()])
                at += targets[r].numel()

    def gather(
        self, data: Tensor, targets: Sequence[Tensor] | None, root: int, *, timeout_s: float, signature: bytes
    ) -> None:
        home = self._hosts[self._host_of[root]]
        if self._rank in home:
            local = None if targets is None else [targets[r] for r in home]
            local_root = home.index(root)
            collectives.gather(self._mesh, data, local, local_root, timeout_s=timeout_s, signature=signature)
        said = self._enter(signature, timeout_s)
        if targets is not None:
            far = {r: targets[r] for r in range(self._size) if r not in home}
            self._between.check_lengths({}, {r: t.numel() for r, t in far.items()}, timeout_s=timeout_s, said=said)
            self._between.swap({}, far, timeout_s=timeout_s, said=said)
        elif self._rank not in home:
            self._between.check_lengths({root: data.numel()}, {}, timeout_s=timeout_s, said=said)
            self._between.swap({root: data}, {}, timeout_s=timeout_s, said=said)

    def scatter(
        self, target: Tensor, sources: Sequence[Tensor] | None, root: int, *, timeout_s: float, signature: bytes
    ) -> None:
        home = self._hosts[self._host_of[root]]
        if self._rank in home:
            local = None if sources is None else [sources[r] for r in home]
            local_root = home.index(root)
            collectives.scatter(self._mesh, target, local, local_root, timeout_s=timeout_s, signature=signature)
        said = self._enter(signature, timeout_s)
        if sources is not None:
            far = {r: sources[r] for r in range(self._size) if r not in home}
            self._between.check_lengths({r: t.numel() for r, t in far.items()}, {}, timeout_s=timeout_s, said=said)
            self._between.swap(far, {}, timeout_s=timeout_s, said=said)
        elif self._rank not in home:
            self._between.check_lengths({}, {root: target.numel()}, timeout_s=timeout_s, said=said)
            self._between.swap({}, {root: target}, timeout_s=timeout_s, said=said)

    def all_to_all(
        self, sources: Sequence[Tensor], targets: Sequence[Tensor], *, timeout_s: float, signature: bytes
    ) -> None:
        home = self._hosts[self._host]
        collectives.all_to_all(
            self._mesh, [sources[r] for r in home], [targets[r] for r in home], timeout_s=timeout_s, signature=signature
        )
        said = self._enter(signature, timeout_s)
        far = [r for r in range(self._size) if r not in home]
        sizes = {r: sources[r].numel() for r in far}
        self._between.check_lengths(sizes, {r: targets[r].numel() for r in far}, timeout_s=timeout_s, said=said)
        self._between.swap({r: sources[r] for r in far}, {r: targets[r] for r in far}, timeout_s=timeout_s, said=said)
