"""The tensors of a model that may depend on earlier chunks only, for tests that no later chunk leaks into them."""

import torch

from partnets.nn.partitioned import partitioned_layers


def owned(model, states, partitions):
    """Return these partitions' entries of parameters, of the moments in `states`, and of layers' statistics."""
    tensors = []
    for _, layer in partitioned_layers(model):
        for name, parameter in layer.owned():
            moments = [value for key, value in states[parameter].items() if key != "step"]
            for j in partitions:
                found, partition = layer.entries(name, [parameter.detach(), *moments], j)
                tensors += found if partition is None else [tensor[partition.mask(j)] for tensor in found]
        for _, statistics in layer.named_buffers(recurse=False):
            tensors += [statistics[j - 1] for j in partitions]
    return tensors


def same(pair, partitions):
    """Return whether two pairs (model, optimizer states) have bitwise equal entries in these partitions."""
    return all(torch.equal(a, b) for a, b in zip(*(owned(*one, partitions) for one in pair), strict=True))
