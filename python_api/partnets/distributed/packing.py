"""Packing: reduces gradient buckets to the entries of the partition that learns."""

# Without `from __future__ import annotations`: DistributedDataParallel compares a hook's annotations with types.

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from partkernels import Partition, gather_entries, scatter_entries
from partnets.subnetworks.parameters import PartitionedParameter, partitioned_parameters
from partnets.subnetworks.state import PER_EXAMPLE


@dataclass
class Part:
    """The part of a parameter's gradient that a rank sends.

    Attributes:
        view: the gradient, into which the mean is written.
        k: the partition that learns; 0 for ψ.
        partition: that of the entries to send; None sends all.
        vector: the parameter, if it is a vector of partition k.
        is_used: whether this rank has a gradient of it.
        is_own: whether the view is memory of its own, not DistributedDataParallel's.
    """

    view: Tensor
    k: int = 0
    partition: Partition | None = None
    vector: PartitionedParameter | None = None
    is_used: bool = True
    is_own: bool = False

    def take(self) -> None:
        """Note the mean of a vector's gradient that only other ranks have."""
        state, name = self.vector.state, self.vector.name
        if self.is_own:
            state.grads.setdefault(name, {})[self.k] = self.view
        else:
            state.grads.pop(name, None)  # `.grad` was cleared
            state.grad_of[name] = self.k
            state.grad_seen.pop(name, None)


class Packing:
    """The state of the communication hook `Packing.reduce` of DistributedDataParallel, for one model.

    The entries to send and their order follow from the partitions, which are the same on all ranks, so no indices are
    sent. Partitioned parameters send the entries of the partition that learns, or nothing if no partition does. All
    other parameters, ψ, are sent whole.

    Attributes:
        bytes: the bytes of gradients that this rank has passed to all-reduce.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None) -> None:
        self.group, self.bytes = group, 0
        self._parameters = list(model.parameters())
        self._owners = {owner.parameter: owner for owner in partitioned_parameters(model)}
        self._last = max((owner.state.num_partitions for owner in self._owners.values()), default=0)
        self._learning: dict[nn.Parameter, set[int]] = {}
        self._reductions: list[tuple[Future[Tensor], Tensor, list[Part], Tensor]] = []
        self._has_sent = False

    def expect(self) -> None:
        """Record the entries that get a gradient in the next backward pass: partition `update` of each module, and ψ.

        Earlier records are kept until a gradient is sent, as several forward passes may precede one backward pass, or
        a backward pass may follow others inside no_sync.
        """
        if self._has_sent:
            self._learning.clear()
            self._reductions.clear()  # left by a backward pass that was interrupted
            self._has_sent = False
        for parameter in self._parameters:
            if parameter.requires_grad and (learning := _learning(self._owners.get(parameter))):
                self._learning.setdefault(parameter, set()).update(learning)

    def reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Average the trained gradients of a bucket over ranks in a packed buffer."""
        self._has_sent = True
        parameters, buffer = bucket.parameters(), bucket.buffer()
        pairs = zip(parameters, bucket.gradients(), strict=True)
        parts = [part for parameter, grad in pairs for part in self._sent(parameter, _in_place(grad, parameter))]
        if not parts:
            done: Future[Tensor] = Future()
            done.set_result(buffer)
            return done
        pieces = [
            one.view.reshape(-1) if one.partition is None else gather_entries(one.view, one.partition, one.k)
            for one in parts
        ]
        self.bytes += sum(piece.nbytes for piece in pieces)
        vectors = [part for part in parts if part.vector is not None]
        pieces.append(buffer.new_tensor([float(part.is_used) for part in vectors]))
        pieces.append(self._who_learns(parameters, buffer))
        packed = torch.cat(pieces).div_(dist.get_world_size(self.group))
        # Views, which the reduction fills in place.
        *means, are_used, who_learns = packed.split([len(piece) for piece in pieces])

        def unpack(future: Future) -> Tensor:
            future.value()
            for part, mean in zip(parts, means, strict=True):
                if part.partition is None:
                    part.view.copy_(mean.view_as(part.view))
                else:
                    scatter_entries(part.view, part.partition, part.k, mean)
            return buffer

        reduction = dist.all_reduce(packed, group=self.group, async_op=True).get_future().then(unpack)
        if not self._reductions:  # raised in a reduction's callback, it would become a RuntimeError with a traceback
            torch.autograd.Variable._execution_engine.queue_callback(self._check)
        self._reductions.append((reduction, who_learns, vectors, are_used))
        return reduction

    def _sent(self, parameter: nn.Parameter, grad: Tensor) -> Iterator[Part]:
        """Yield what to send of a parameter's gradient, given DistributedDataParallel's view of it."""
        owner, learning = self._owners.get(parameter), sorted(self._learning.get(parameter, ()))
        for k in learning:
            if owner is None or owner.owner is not None:
                yield Part(grad, k)
            elif owner.is_vector:
                yield _part_of_vector(owner, grad, k, is_alone=len(learning) == 1)
            else:
                yield Part(grad, k, owner.partition)

    def _who_learns(self, parameters: list[nn.Parameter], like: Tensor) -> Tensor:
        """Return flags of ψ, w_1, ..., w_C that learn, then flags of those that do not, as 1 or 0: [2 (1 + C)].

        In the mean over ranks, both flags are above 0 only where ranks differ, in every dtype and for any number of
        ranks.
        """
        found = like.new_zeros(2, 1 + self._last)
        found[1] = 1
        for k in set().union(*(self._learning.get(parameter, ()) for parameter in parameters)):
            found[0, k], found[1, k] = 1, 0
        return found.flatten()

    def _check(self) -> None:
        """Raise ValueError at the end of a backward pass, on all ranks, unless all ranks train the same."""
        reductions, self._reductions = self._reductions, []
        for reduction, *_ in reductions:
            reduction.wait()
        means = torch.stack([mean for _, mean, *_ in reductions]).view(-1, 2, 1 + self._last)
        if different := (means > 0).all(1).any(0).nonzero().flatten().tolist():
            names = ", ".join(f"w_{k}" if k else "ψ" for k in different)
            raise ValueError(
                f"{names} learned in this backward pass on some ranks and not on others, so their gradients are mixed;"
                " choose the same subnetwork on all ranks, by generators with the same seed."
            )
        are_used = torch.cat([used for *_, used in reductions]).tolist()
        for part, is_used in zip((part for *_, vectors, _ in reductions for part in vectors), are_used, strict=True):
            if is_used and not part.is_used:
                part.take()


def _learning(owner: PartitionedParameter | None) -> set[int]:
    """Return the partitions of a parameter that learn now; {0} for ψ."""
    if owner is None:
        return {0}
    update = owner.state.update
    if owner.owner is not None:
        return {owner.owner} & {owner.owner if update == PER_EXAMPLE else update}
    if update == PER_EXAMPLE:  # ranks may have other subnetworks
        return {*range(1, owner.state.num_partitions + 1)}
    return {update} - {None}


def _part_of_vector(owner: PartitionedParameter, grad: Tensor, k: int, is_alone: bool) -> Part:
    """Return the gradient of partition k's vector: the parameter's, one that was set aside, or zeros if it has none."""
    state, name, has_gradient = owner.state, owner.name, owner.parameter.grad is not None
    if has_gradient and state.grad_of.get(name) == k:
        return Part(grad, k, vector=owner)
    if has_gradient and k in (kept := state.grads.get(name, {})):
        return Part(kept[k], k, vector=owner)
    if is_alone and not has_gradient:
        return Part(grad.zero_(), k, vector=owner, is_used=False)
    return Part(torch.zeros_like(owner.parameter, requires_grad=False), k, vector=owner, is_used=False, is_own=True)


def _in_place(grad: Tensor, parameter: nn.Parameter) -> Tensor:
    """View a bucket's gradient with the parameter's strides, which the bucket does not record."""
    strides = parameter.stride()
    if torch.empty_like(parameter, device="meta").stride() != strides:  # the parameter has gaps between entries
        return grad
    return grad.as_strided(parameter.shape, strides)
