"""The tensors of a model that may depend on earlier chunks only, for tests that no later chunk leaks into them."""

import torch

from partnets.subnetworks.parameters import partitioned_parameters
from partnets.subnetworks.state import ROWS, partitioned_modules, state_of


def owned(model, states, partitions):
    """Return these partitions' entries of parameters, of the moments in `states`, and of layers' statistics."""
    tensors = []
    for one in partitioned_parameters(model):
        moments = [value for key, value in states[one.parameter].items() if key != "step"]
        tensors += [one.take(tensor, k) for k in partitions for tensor in (one.stored.detach(), *moments)]
    for module in partitioned_modules(model):
        for name in state_of(module).statistics:
            *earlier, _ = module.get_buffer(name + ROWS)
            tensors += [[*earlier, module.get_buffer(name)][k - 1] for k in partitions]
    return tensors


def same(pair, partitions):
    """Return whether two pairs (model, optimizer states) have bitwise equal entries in these partitions."""
    return all(torch.equal(a, b) for a, b in zip(*(owned(*one, partitions) for one in pair), strict=True))
