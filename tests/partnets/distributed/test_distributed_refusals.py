"""Uses that would mix subnetworks or let ranks wait for each other are refused on all ranks."""

import pytest
import torch
import torch.distributed as dist
from small_network import Drift
from test_distributed_learning import looking_ahead
from torch import nn
from training import mesh, network, trainer, trainer_of, whole

import partnets
from partnets import distributed, hyper, optim


def small(*layers, defaults="zero", **options):
    layers = layers or [nn.Linear(4, 2)]
    return partnets.partition(nn.Sequential(*layers), (0.5, 0.5), defaults=defaults, **options)


def sharded(seed=0, **options):
    torch.manual_seed(seed)
    return distributed.fully_shard(small(), mesh=mesh(), **options)


def distribute_inside(distribute):
    model = network()
    with partnets.subnetwork(model, active=1):
        distribute(model)


def mix_gradients_of_shards():
    model, x = sharded(), torch.ones(2, 4)
    model.set_requires_gradient_sync(False)
    for k in (1, 2):
        with partnets.subnetwork(model, active=k, update=k):
            model(x).sum().backward()


def without_start():
    with torch.device("meta"):
        model = small(nn.Linear(4, 3), nn.ParameterList([torch.ones(3, 3)]))
    distributed.fully_shard(model, mesh=mesh(), initialise=True)


class Parent(nn.Sequential):
    """A module that initialises those inside of it."""

    def reset_parameters(self):
        for module in self:
            nn.init.trunc_normal_(module.weight)


class Counted(nn.Linear):
    """A layer with a buffer that its initialisation leaves out."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("order", torch.arange(3))


def from_meta(*layers, initialise=True, **options):
    with torch.device("meta"):
        model = partnets.partition(nn.Sequential(*(make() for make in layers)), (0.5, 0.5), **options)
    return distributed.fully_shard(model, mesh=mesh(), initialise=initialise)


def of_own_generator(module):
    for parameter in module.parameters(recurse=False):
        parameter.normal_(generator=torch.Generator().manual_seed(dist.get_rank()))


def raise_on_rank_1(module):
    if dist.get_rank():
        raise RuntimeError("mine")
    if isinstance(module, nn.Linear):
        module.reset_parameters()


def units_with_a_shared_weight():
    model = small(nn.Embedding(4, 4), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    distributed.fully_shard(model, [model[0], model[1]], mesh=mesh())


def enter_gathered():
    model = sharded()
    with partnets.subnetwork(model, active=1):
        model(torch.ones(2, 4))
    model[0].unshard()
    with partnets.subnetwork(model, active=1):
        pass


def sharded_ahead():
    torch.manual_seed(0)
    network = nn.Linear(6, 3)
    model = partnets.partition(nn.Sequential(network, decay := hyper.WeightDecay(network)), (0.6, 0.2, 0.2))
    distributed.fully_shard(model, mesh=mesh())
    trainer_of(model, hyper=decay)


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
    trainer_of(model, hyper=mask, **options)


RATES, CLOSE = (0.01, 0.02), (torch.tensor(0.01), torch.tensor(0.0100001))
OF_THE_GRU = ", ".join(f"the {what} of 1.weight_{to}_l0" for to in ("ih", "hh") for what in ("map", "defaults"))
SAME = "construct the same model, chunks and trainer on all ranks"
EVEN = (torch.arange(20),), (0.5, 0.5)
# Calls on each rank, and their errors.
REFUSED = [
    (lambda: distributed.share(partnets.chunk(*EVEN)).sample(1, 5),
     "batch_size=5 cannot be shared by 2 ranks; pass a multiple of 2"),
    (lambda: distribute_inside(distributed.DDP), "before a subnetwork is entered"),
    (lambda: distribute_inside(distributed.fully_shard), "before a subnetwork is entered"),
    (lambda: distributed.DDP(small(nn.Linear(4, 3), nn.GRU(3, 3), defaults=None, seed=dist.get_rank())),
     f"the map of 0.weight, the defaults of 0.weight, {OF_THE_GRU}; {SAME}"),
    (lambda: sharded(seed=dist.get_rank()), f"the ranks differ in 0.weight, 0.bias, 0.bias_rows; {SAME}"),
    (lambda: sharded(reshard_after_forward=False),
     "would leave the gathered weights of one subnetwork for the next; leave it out"),
    (lambda: distributed.fully_shard(sharded(), mesh=mesh()), "is sharded already"),
    (units_with_a_shared_weight, "0.weight is in two units; pass units= with one, such as a list of modules"),
    (lambda: from_meta(lambda: Parent(nn.Linear(4, 3))), "has written into 0.0.weight, which is in another unit"),
    (lambda: from_meta(lambda: Counted(4, 3)), "initialise has left order of 0 (Counted) without values"),
    (lambda: from_meta(lambda: nn.Linear(4, 3), seed=dist.get_rank(), defaults="zero"),
     f"the ranks differ in the partitions of 0; {SAME}"),
    (lambda: from_meta(lambda: nn.Linear(4, 3), initialise=of_own_generator),
     f"the ranks differ in what initialise gives tensor 0 of a unit, what initialise gives tensor 1 of a unit; {SAME}"),
    (lambda: from_meta(lambda: nn.Linear(4, 3), initialise=raise_on_rank_1), "mine"),
    (lambda: distributed.fully_shard(nn.Sequential(nn.Linear(4, 3)), mesh=mesh()), "has no partitions"),
    (without_start, "1 (ParameterList) has parameters or buffers on the meta device and no reset_parameters()"),
    (lambda: partnets.merge(sharded()), "load it into a model of one process"),
    (lambda: partnets.subnetwork(sharded(), active=torch.tensor([1, 2])).__enter__(),
     "the model is sharded, and computes one subnetwork at a time"),
    (mix_gradients_of_shards, "of partition 1 have not been reduced, and those of 2 would be added to them"),
    (enter_gathered, "the weight of a FSDPLinear is still gathered from its shards; call reshard()"),
    (lambda: distributed.Trainer(nn.parallel.DistributedDataParallel((one := trainer()).model), one.chunks),
     "is inside of DistributedDataParallel; pass the wrapped model"),
    (sharded_ahead, "1 learns by looking ahead, which needs whole weights"),
    *((lambda use=use: getattr(trainer(sharded=True), use)("checkpoint.pt"),
       f"no rank has the whole model, which is sharded; use partnets.distributed.{use}") for use in ("save", "load")),
    (lambda: trainers(seed=(0, 1)), f"the ranks differ in the seed; {SAME}"),
    (lambda: trainers(lml_every=(4, 8)), f"the ranks differ in lml_every; {SAME}"),
    (lambda: trainers(patience=(3, 4)), f"the ranks differ in patience; {SAME}"),
    (lambda: trainers(batch_size=(16, 8), hyper_every=(1, 2)), "the ranks differ in batch_size, hyper_batch_size"),
    (lambda: trainer(batch_size=21), "batch_size=21 cannot be shared by 2 ranks; pass a multiple"),
    (lambda: trainer(hyper_batch_size=21), "hyper_batch_size=21 cannot be shared by 2 ranks; pass a multiple"),
    (lambda: trainer(one_pass=True), "divides the batches into 10, 3, 3, 8, 8 examples, which 2 ranks"),
    (lambda: other_settings("optimizer", "lr", RATES), f"the ranks differ in optimizer.param_groups.0.lr; {SAME}"),
    (lambda: other_settings("optimizer", "betas", ((0.9, 0.999), (0.9, 0.99))),
     "in optimizer.param_groups.0.betas;"),
    (lambda: other_settings("hyper_optimizer", "lr", CLOSE), "the ranks differ in hyper_optimizer.param_groups.0.lr;"),
    (lambda: other_settings("scheduler", "gamma", RATES), f"the ranks differ in scheduler.gamma; {SAME}"),
    (lambda: other_settings("", "", RATES), None),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_ranks_that_cannot_train_together_are_refused(case, two_ranks):
    message = REFUSED[case][1]
    for found in two_ranks(error_of, case):
        assert found is None if message is None else message in found


def error_of(case):
    """Return the message of a call's error, or None."""
    try:
        REFUSED[case][0]()
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


def leak_on_one_rank():
    layers = Drift(6, follows=dist.get_rank() == 1), nn.Linear(6, 2)
    model = partnets.partition(nn.Sequential(*layers), (0.6, 0.2, 0.2)).double()
    with pytest.raises((ValueError, RuntimeError)) as error:
        trainer_of(model).fit(1)
    return str(error.value)


def test_a_leak_found_by_only_one_rank_raises_on_all(two_ranks):
    first, last = two_ranks(leak_on_one_rank)
    assert "0.mean follows the data" in last and first.startswith("rank 1 raised ValueError: this model carries")
