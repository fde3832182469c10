"""OptimizerState: a partitioned optimiser for torch.distributed.checkpoint."""

from __future__ import annotations

from torch import nn

from partnets.optim import PartitionedOptimizer


class OptimizerState:
    """The state of a partitioned optimiser under its parameters' names, for torch.distributed.checkpoint.

    It corresponds to torch.distributed.checkpoint.state_dict for torch's optimisers: names, unlike indices, do not
    depend on the order of parameters, and moments before the first step are zeros, into which they can be loaded.

    Args:
        model: the optimiser's model.

    Example:
        >>> import partnets, tempfile, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> def parts():
        ...     model = partnets.partition(nn.Sequential(nn.Linear(4, 3)), (0.5, 0.5))
        ...     return model, partnets.optim.Adam(model)
        >>> model, optimizer = parts()
        >>> with partnets.subnetwork(model, active=1, update=1):
        ...     model(torch.ones(2, 4)).sum().backward()
        >>> optimizer.step(update=1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = dcp.save({"model": model, "optimizer": OptimizerState(model, optimizer)}, checkpoint_id=folder)
        ...     model, optimizer = parts()
        ...     dcp.load({"model": model, "optimizer": OptimizerState(model, optimizer)}, checkpoint_id=folder)
        >>> optimizer.state[model[0].bias]["step"]
        tensor([1, 0])
        >>> dist.destroy_process_group()
    """

    def __init__(self, model: nn.Module, optimizer: PartitionedOptimizer) -> None:
        self.optimizer = optimizer
        self._names = {parameter: name for name, parameter in model.named_parameters()}

    def state_dict(self) -> dict:
        """Return {'state': {name: {moment: tensor, ...}}, 'groups': [settings, with names under 'params']}."""
        names = [self._names[parameter] for parameter in self.optimizer.parameters()]
        states = self.optimizer.full_states()
        groups = self.optimizer.state_dict()["param_groups"]
        groups = [group | {"params": [names[i] for i in group["params"]]} for group in groups]
        return {"state": {self._names[parameter]: state for parameter, state in states.items()}, "groups": groups}

    def load_state_dict(self, state_dict: dict) -> None:
        """Load a result of `state_dict`.

        Raises:
            ValueError: as for the optimiser's load_state_dict, or the groups have other parameters than this one's.
        """
        names = [self._names[parameter] for parameter in self.optimizer.parameters()]
        if [name for group in state_dict["groups"] for name in group["params"]] != names:
            raise ValueError(
                "the saved optimiser's groups have other parameters than this one's; construct it with the same groups."
            )
        numbers = {name: i for i, name in enumerate(names)}
        state, groups = {}, []
        for group, saved in zip(self.optimizer.param_groups, state_dict["groups"], strict=True):
            groups.append(saved | {"params": [numbers[name] for name in saved["params"]]})
            for parameter in group["params"]:
                name = self._names[parameter]
                state[numbers[name]] = state_dict["state"][name]
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})
