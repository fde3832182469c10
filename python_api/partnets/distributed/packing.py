"""Packing: reduces gradient buckets to the entries of the partition that learns."""

# Without `from __future__ import annotations`: DistributedDataParallel compares a hook's annotations with types.

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from partkernels import Partition
from partnets.nn.entries import put, take
from partnets.nn.partitioned import partitioned_layers


class Packing:
    """The state of the communication hook `all_reduce_packed`, for one model.

    The entries to send and their order follow from the partitions, which are the same on all ranks, so no indices are
    sent. Parameters of partitioned layers send the entries of the partition that learns, or nothing if no partition
    does. All other parameters, ψ, are sent whole.

    Attributes:
        bytes: the bytes of gradients that this rank has passed to all-reduce.
        has_travelled: whether a recorded gradient has been sent; the next `expect` then belongs to another backward
            pass.

    Args:
        model: a model with partitioned layers.
        group: the process group of the ranks; all ranks if None.

    Example:
        >>> import partnets
        >>> model = partnets.Linear(4, 3, proportions=(0.5, 0.25, 0.25), bias=False, seed=0)
        >>> packing = Packing(model)
        >>> with partnets.subnetwork(model, active=2, update=2):
        ...     packing.expect()
        >>> [partition.sizes()[k - 1] for _, partition, k in packing.travelling(model.weight, torch.ones(3, 4))]
        [3]
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
        self.group, self.bytes = group, 0
        self._parameters = list(model.parameters())
        self._owners = {
            parameter: (layer, name) for _, layer in partitioned_layers(model) for name, parameter in layer.owned()
        }
        self._learning: dict[nn.Parameter, set[int]] = {}
        self._last = max((layer.count for layer, _ in self._owners.values()), default=0)
        self._reductions: list[tuple[Future[Tensor], Tensor]] = []
        self.has_travelled = False

    def expect(self) -> None:
        """Record the entries that get a gradient in the next backward pass: partition `update` of each layer, and ψ.

        Earlier records are kept until a gradient is sent, as several forward passes may precede one backward pass, or
        a backward pass may follow others inside no_sync.
        """
        if self.has_travelled:
            self._learning.clear()
            self._reductions.clear()  # left by a backward pass that was interrupted
            self.has_travelled = False
        for parameter in self._parameters:
            layer, _ = self._owners.get(parameter, (None, ""))
            if parameter.requires_grad and (learning := {0} if layer is None else layer.learning()):
                self._learning.setdefault(parameter, set()).update(learning)

    def travelling(self, parameter: nn.Parameter, grad: Tensor) -> Iterator[tuple[Tensor, Partition | None, int]]:
        """Yield views of a parameter's gradient with the Partition and k of the entries to send; None sends all."""
        for update in sorted(self._learning.get(parameter, ())):
            layer, name = self._owners.get(parameter, (None, ""))
            found = ([grad], None) if layer is None else layer.entries(name, [grad], update)
            if found is not None:
                (view,), partition = found
                yield view, partition, update

    def who_learns(self, parameters: list[nn.Parameter], like: Tensor) -> Tensor:
        """Return flags of ψ, w_1, ..., w_C that learn, then flags of those that do not, as 1 or 0: [2 (1 + C)].

        In the mean over ranks, both flags are above 0 only where ranks differ, in every dtype and for any number of
        ranks.
        """
        found = like.new_zeros(2, 1 + self._last)
        found[1] = 1
        for k in set().union(*(self._learning.get(parameter, ()) for parameter in parameters)):
            found[0, k], found[1, k] = 1, 0
        return found.flatten()

    def compare(self, reduction: Future[Tensor], who_learns: Tensor) -> None:
        """Let the backward pass raise ValueError at its end, on all ranks, unless all ranks train the same.

        Args:
            reduction: a bucket's reduction, after which who_learns is the mean over ranks.
            who_learns: the result of the method who_learns.
        """
        if not self._reductions:  # raised in a reduction's callback, it would become a RuntimeError with a traceback
            torch.autograd.Variable._execution_engine.queue_callback(self._check)
        self._reductions.append((reduction, who_learns))

    def _check(self) -> None:
        reductions, self._reductions = self._reductions, []
        for reduction, _ in reductions:
            reduction.wait()
        means = torch.stack([mean for _, mean in reductions]).view(-1, 2, 1 + self._last)
        if different := (means > 0).all(1).any(0).nonzero().flatten().tolist():
            names = ", ".join(f"w_{k}" if k else "ψ" for k in different)
            raise ValueError(
                f"{names} learned in this backward pass on some ranks and not on others, so their gradients are mixed;"
                " choose the same subnetwork on all ranks, as partnets.distributed.draw does."
            )


def _in_place(grad: Tensor, parameter: nn.Parameter) -> Tensor:
    """View a bucket's gradient with the parameter's strides, which the bucket does not record."""
    strides = parameter.stride()
    if torch.empty_like(parameter, device="meta").stride() != strides:  # the parameter has gaps between entries
        return grad
    return grad.as_strided(parameter.shape, strides)


def all_reduce_packed(packing: Packing, bucket: dist.GradBucket) -> Future[Tensor]:
    """Average trained gradients over ranks in a packed buffer; a communication hook for DistributedDataParallel."""
    packing.has_travelled = True
    parts = [
        part
        for parameter, grad in zip(bucket.parameters(), bucket.gradients(), strict=True)
        for part in packing.travelling(parameter, _in_place(grad, parameter))
    ]
    buffer = bucket.buffer()
    if not parts:
        done: Future[Tensor] = Future()
        done.set_result(buffer)
        return done
    pieces = [take(view, partition, k) for view, partition, k in parts]
    packing.bytes += sum(piece.nbytes for piece in pieces)
    pieces.append(packing.who_learns(bucket.parameters(), buffer))
    packed = torch.cat(pieces).div_(dist.get_world_size(packing.group))
    *means, who_learns = packed.split([len(piece) for piece in pieces])  # views, which the reduction fills in place

    def unpack(future: Future) -> Tensor:
        future.value()
        for (view, partition, k), mean in zip(parts, means, strict=True):
            put(view, partition, k, mean)
        return buffer

    reduction = dist.all_reduce(packed, group=packing.group, async_op=True).get_future().then(unpack)
    packing.compare(reduction, who_learns)
    return reduction
