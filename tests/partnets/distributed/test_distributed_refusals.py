"""Uses that would mix subnetworks or let ranks wait for each other are refused on all ranks."""

import pytest
import torch
import torch.distributed as dist
from test_distributed_learning import looking_ahead
from torch import nn
from training import examples, mesh, network, trainer, whole

import partnets
from partnets import distributed, hyper, optim


def small(**options):
    return partnets.partition(nn.Sequential(nn.Linear(4, 2)), (0.5, 0.5), **{"defaults": "zero"} | options)


def sharded():
    torch.manual_seed(0)
    return distributed.fully_shard(small(), mesh=mesh())


def share_unevenly():
    distributed.share(partnets.chunk((torch.arange(20),), (0.5, 0.5))).sample(1, 5)


def distribute_inside(distribute):
    model = network()
    with partnets.subnetwork(model, active=1):
        getattr(distributed, distribute)(model)


def wrap_with_other_seed():
    model = partnets.partition(nn.Sequential(nn.Linear(4, 3), nn.GRU(3, 3)), (0.5, 0.5), seed=dist.get_rank())
    distributed.DDP(model)


def shard_other_weights():
    torch.manual_seed(dist.get_rank())
    distributed.fully_shard(small(), mesh=mesh())


def shard_and_keep_gathered():
    distributed.fully_shard(small(), mesh=mesh(), reshard_after_forward=False)


def shard_twice():
    distributed.fully_shard(sharded(), mesh=mesh())


def merge_sharded():
    partnets.merge(sharded())


def per_example_of_shards():
    with partnets.subnetwork(sharded(), active=torch.tensor([1, 2])):
        pass


def mix_gradients_of_shards():
    model, x = sharded(), torch.ones(2, 4)
    model.set_requires_gradient_sync(False)
    for k in (1, 2):
        with partnets.subnetwork(model, active=k, update=k):
            model(x).sum().backward()


def enter_gathered():
    model = sharded()
    with partnets.subnetwork(model, active=1):
        model(torch.ones(2, 4))
    model[0].unshard()
    with partnets.subnetwork(model, active=1):
        pass


def wrapped_trainer():
    one = trainer()
    distributed.Trainer(nn.parallel.DistributedDataParallel(one.model), one.chunks)


def sharded_ahead():
    torch.manual_seed(0)
    network = nn.Linear(6, 3)
    model = partnets.partition(nn.Sequential(network, decay := hyper.WeightDecay(network)), (0.6, 0.2, 0.2))
    distributed.fully_shard(model, mesh=mesh())
    distributed.Trainer(model, partnets.chunk(examples(), (0.6, 0.2, 0.2)), hyper=decay)


def use_one_file(function):
    getattr(trainer(sharded=True), function)("checkpoint.pt")


def trainers(**options):
    """Construct trainers with options of each rank."""
    trainer(**{name: values[dist.get_rank()] for name, values in options.items()})


def other_settings(name, setting, values):
    """Construct a trainer with an optimiser or scheduler that has different settings on each rank."""
    torch.manual_seed(0)
    model = partnets.partition(nn.Sequential(mask := hyper.InputMask(6), nn.Linear(6, 2)), (0.6, 0.2, 0.2))
    own = {setting: values[dist.get_rank()]}
    optimizer = optim.Adam(model, **own if name == "optimizer" else {})
    optimizer.param_groups[0]["of the user"] = object()  # its repr differs on each rank
    options = {"optimizer": optimizer}
    if not name:
        options["scheduler"] = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    if name == "hyper_optimizer":
        options[name] = torch.optim.Adam(mask.parameters(), **own)
    if name == "scheduler":
        options[name] = torch.optim.lr_scheduler.StepLR(optimizer, 10, **own)
    distributed.Trainer(model, partnets.chunk(examples(), (0.6, 0.2, 0.2)), hyper=mask, batch_size=16, **options)


RATES, CLOSE = (0.01, 0.02), (torch.tensor(0.01), torch.tensor(0.0100001))
OF_THE_GRU = ", ".join(f"the {what} of 1.weight_{to}_l0" for to in ("ih", "hh") for what in ("map", "defaults"))
SAME = "construct the same model, chunks and trainer on all ranks"


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (share_unevenly, (), "batch_size=5 cannot be shared by 2 ranks; pass a multiple of 2"),
        (distribute_inside, ("DDP",), "before a subnetwork is entered"),
        (distribute_inside, ("fully_shard",), "before a subnetwork is entered"),
        (wrap_with_other_seed, (), f"the map of 0.weight, the defaults of 0.weight, {OF_THE_GRU}; {SAME}"),
        (shard_other_weights, (), f"the ranks differ in 0.weight, 0.bias, 0.bias_rows; {SAME}"),
        (shard_and_keep_gathered, (), "would leave the gathered weights of one subnetwork for the next; leave it out"),
        (shard_twice, (), "is sharded already"),
        (merge_sharded, (), "load it into a model of one process"),
        (per_example_of_shards, (), "the model is sharded, and computes one subnetwork at a time"),
        (mix_gradients_of_shards, (), "of partition 1 have not been reduced, and those of 2 would be added to them"),
        (enter_gathered, (), "the weight of a FSDPLinear is still gathered from its shards; call reshard()"),
        (wrapped_trainer, (), "is inside of DistributedDataParallel; pass the wrapped model"),
        (sharded_ahead, (), "1 learns by looking ahead, which needs whole weights"),
        (use_one_file, ("save",), "no rank has the whole model, which is sharded; use partnets.distributed.save"),
        (use_one_file, ("load",), "no rank has the whole model, which is sharded; use partnets.distributed.load"),
        (trainers, {"seed": (0, 1)}, f"the ranks differ in the seed; {SAME}"),
        (trainers, {"lml_every": (4, 8)}, f"the ranks differ in lml_every; {SAME}"),
        (trainers, {"patience": (3, 4)}, f"the ranks differ in patience; {SAME}"),
        (trainers, {"batch_size": (16, 8), "hyper_every": (1, 2)}, "the ranks differ in batch_size, hyper_batch_size"),
        (trainers, {"batch_size": (21, 21)}, "batch_size=21 cannot be shared by 2 ranks; pass a multiple"),
        (trainers, {"hyper_batch_size": (21, 21)}, "hyper_batch_size=21 cannot be shared by 2 ranks; pass a multiple"),
        (trainers, {"one_pass": (True, True)}, "divides the batches into 10, 3, 3, 8, 8 examples, which 2 ranks"),
        (other_settings, ("optimizer", "lr", RATES), f"the ranks differ in optimizer.param_groups.0.lr; {SAME}"),
        (other_settings, ("optimizer", "betas", ((0.9, 0.999), (0.9, 0.99))), "in optimizer.param_groups.0.betas;"),
        (other_settings, ("hyper_optimizer", "lr", CLOSE), "the ranks differ in hyper_optimizer.param_groups.0.lr;"),
        (other_settings, ("scheduler", "gamma", RATES), f"the ranks differ in scheduler.gamma; {SAME}"),
        (other_settings, ("", "", RATES), None),
    ],
)
def test_ranks_that_cannot_train_together_are_refused(function, arguments, message, two_ranks):
    for found in two_ranks(error_of, function, arguments):
        assert found is None if message is None else message in found


def error_of(function, arguments):
    """Return the message of a function's error, or None."""
    try:
        function(**arguments) if isinstance(arguments, dict) else function(*arguments)
    except (ValueError, RuntimeError) as error:
        return str(error)


@pytest.mark.parametrize("option", ["find_unused_parameters", "gradient_as_bucket_view", "static_graph"])
def test_options_that_ddp_sets_itself_are_named_with_the_cure(option):
    for name, value in ((option, False), ("mixed_precision", object())):
        with pytest.raises(ValueError, match=f"{name} cannot be passed, .* leave it out, and use torch.autocast"):
            distributed.DDP(network(), **{name: value})


def other_partitions(dtype):
    """Check that a step raises if ranks update different partitions of one size; return whether nothing changed."""
    model = partnets.partition(nn.Sequential(nn.Linear(8, 10), nn.Linear(10, 3)), (0.6, 0.2, 0.2)).to(dtype)
    call, optimizer, k = distributed.DDP(model, bucket_cap_mb=1e-4), optim.SGD(model, lr=1.0), 2 + dist.get_rank()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    message = "w_2, w_3 learned in this backward pass on some ranks and not on others.*; choose the same subnetwork"
    with pytest.raises(ValueError, match=message), partnets.subnetwork(model, active=k, update=k):
        call(torch.ones(4, 8, dtype=dtype)).sum().backward()
        optimizer.step(update=k)
    return all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_that_learn_other_partitions_of_one_size_are_refused_before_the_step(dtype, two_ranks):
    assert two_ranks(other_partitions, dtype) == [True, True]


def only_finite_on_rank_0(output, y):
    return nn.functional.cross_entropy(output, y) / (dist.get_rank() == 0)


def infinite():
    with pytest.raises(FloatingPointError, match="step of ψ"):
        looking_ahead("lookahead", {"hyper_loss": only_finite_on_rank_0}, 1)


def test_a_loss_that_is_infinite_on_one_rank_raises_on_both(two_ranks):
    two_ranks(infinite)


class Broken(hyper.Penalty):
    """A loss or penalty that is NaN on the last rank while `is_now` is set."""

    is_now = False

    def forward(self, output, y=None):
        return super().forward(output) if y is None else nn.functional.cross_entropy(output, y) + self.penalty(output)

    def penalty(self, x):
        broken = self.is_now and dist.get_rank() == dist.get_world_size() - 1
        return x.sum() * (float("nan") if broken else 0.0)


def not_finite(part, sharded):
    """Return whether ψ changes, whether w changes, and whether all is finite, after a step with NaN on one rank."""
    broken = Broken()
    options = {"loss": nn.functional.cross_entropy} | ({part: broken} if part != "penalty" else {})
    one = trainer(sharded=sharded, lml_every=None, keep_best=False, **options)
    if part == "penalty":
        one.model[4].register_forward_hook(lambda module, x, output: broken(output))
    one.fit(2)
    one.audit, broken.is_now = False, True
    before = [whole(parameter) for parameter in one.model.parameters()]
    with pytest.raises(FloatingPointError, match="the loss of step 3 is nan"):
        one.fit(1)
    changed = [not torch.equal(old, whole(new)) for old, new in zip(before, one.model.parameters(), strict=True)]
    return any(changed[:2]), any(changed[2:]), all(whole(each).isfinite().all() for each in one.model.parameters())


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("part", ["loss", "hyper_loss", "penalty"])
def test_a_loss_that_is_nan_on_one_rank_raises_on_all_before_anything_is_stepped(part, sharded, two_ranks):
    # ψ is stepped after w; with "hyper_loss", the loss of w was finite.
    assert two_ranks(not_finite, part, sharded) == [(False, part == "hyper_loss", True)] * 2


class Remembers(nn.Module):
    """A module that accumulates a mean of its inputs on the last rank only."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        if dist.get_rank() == dist.get_world_size() - 1 and self.training:
            self.mean += x.mean(0).detach()
        return x + self.mean


def leak_on_one_rank():
    model = partnets.partition(nn.Sequential(Remembers(), nn.Linear(6, 2)), (0.6, 0.2, 0.2)).double()
    distributed.Trainer(model, partnets.chunk(examples(), (0.6, 0.2, 0.2)), batch_size=16).fit(1)


def test_a_leak_found_by_only_one_rank_raises_on_all(two_ranks):
    first, last = two_ranks(error_of, leak_on_one_rank, ())
    assert "0.mean follows the data" in last and first.startswith("rank 1 raised ValueError: this model carries")
