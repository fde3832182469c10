"""What may depend on earlier chunks only, of any model: for the tests that nothing of a later chunk leaks."""

import torch

from partnets.nn.partitioned import partitioned_layers


def owned(model, states, partitions):
    """The entries of these partitions in parameters and moments, which the states have, and their statistics."""
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
    """Whether two trainings, each a model and its optimiser's states, left the same bits in these partitions."""
    return all(torch.equal(a, b) for a, b in zip(*(owned(*one, partitions) for one in pair), strict=True))
