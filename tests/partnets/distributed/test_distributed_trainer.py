"""A trainer on two ranks learns the same as on one process, and each loads the other's checkpoints."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from training import examples, learned, trainer, whole

import partnets
from partnets import distributed, hyper, optim

ONE_PASS = {"one_pass": True, "batch_size": 20, "hyper_batch_size": 8}


def train(steps, options):
    one = trainer(distributed.Trainer, **options)
    one.fit(steps)
    return learned(one)


@pytest.mark.cases(usual=1)
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")
@pytest.mark.parametrize(
    "options",
    [
        {"hyper_every": 2, "pin_memory": True},
        {"hyper_steps": 2, "hyper_batch_size": 6},
        ONE_PASS,
    ],
)
def test_two_ranks_learn_what_one_process_learns_from_the_same_batches(options, two_ranks):
    one = trainer(partnets.Trainer, **options)
    one.fit(20)
    for found in two_ranks(train, 20, options):
        torch.testing.assert_close(found, learned(one), rtol=1e-9, atol=1e-11)


@pytest.mark.full
def test_ranks_whose_number_divides_no_16_share_what_the_audit_takes(three_ranks):
    options = {"batch_size": 24}
    one = trainer(partnets.Trainer, **options)
    one.fit(4)
    for found in three_ranks(train, 4, options):
        torch.testing.assert_close(found, learned(one), rtol=1e-9, atol=1e-11)


def ensemble(kind, steps):
    torch.manual_seed(0)
    extractor = hyper.Submodule(nn.Linear(6, 5))
    networks = [nn.Sequential(extractor, nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)) for _ in range(3)]
    model = partnets.Ensemble(networks).double()
    one = kind(model, partnets.chunk(examples(), (0.6, 0.2, 0.2)), hyper=extractor, batch_size=16)
    one.fit(steps)
    return learned(one)


@pytest.mark.full
def test_two_ranks_learn_an_ensemble_as_one_process_does(two_ranks):
    expected = ensemble(partnets.Trainer, 12)
    for found in two_ranks(ensemble, distributed.Trainer, 12):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


def looking_ahead(kind, technique, options, steps):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3)).double()
    extractor = hyper.Submodule(nn.Linear(6, 6).double())  # learns directly, unlike the others
    rate, decay, smoothing = hyper.LearningRate(network, 0.05), hyper.WeightDecay(network), hyper.LabelSmoothing()
    psi = [extractor, rate, decay, smoothing]
    model = nn.Sequential(extractor, network, *psi[1:]).double()
    model = partnets.partition(model, (0.6, 0.2, 0.2), **options.pop("partition", {})).double()
    by = {rate: partnets.Lookahead(2), decay: technique, smoothing: technique}
    hyper_optimizer = torch.optim.Adam(hyper.hyperparameters(model), lr=0.05)
    options = {"hyper": psi, "loss": smoothing, "hyper_gradient": by, "hyper_optimizer": hyper_optimizer} | options
    one = kind(model, partnets.chunk(examples(), (0.6, 0.2, 0.2)), batch_size=16, **options)
    one.fit(steps)
    return [*map(whole, model.parameters()), torch.tensor([*one.values().values()])]


@pytest.mark.full
@pytest.mark.parametrize(
    ("technique", "options"),
    [
        (partnets.Lookahead(2), {"clip": 0.3, "hyper_steps": 2, "hyper_batch_size": 6}),
        (partnets.Lookahead(2, exact=False), {"partition": {"scheme": "nested", "example": torch.ones(2, 6).double()}}),
        (partnets.Implicit("neumann", terms=3, alpha=0.1), {"hyper_every": 2}),
    ],
    ids=["exact", "differences, nested", "implicit"],
)
def test_two_ranks_look_ahead_as_one_process_does(technique, options, two_ranks):
    if isinstance(technique, partnets.Implicit):
        options = {**options, "sampling": (0.5, 0.25, 0.25)}
    expected = looking_ahead(partnets.Trainer, technique, dict(options), 8)
    for found in two_ranks(looking_ahead, distributed.Trainer, technique, options, 8):
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)


def infinite(technique):
    with pytest.raises(FloatingPointError, match="step of ψ"):
        looking_ahead(distributed.Trainer, technique, {"hyper_loss": only_finite_on_rank_0}, 1)


def only_finite_on_rank_0(output, y):
    return nn.functional.cross_entropy(output, y) / (dist.get_rank() == 0)


def test_a_loss_that_is_infinite_on_one_rank_raises_on_both(two_ranks):
    two_ranks(infinite, "lookahead")


class Broken(hyper.Penalty):
    """A loss or penalty that is NaN on the last rank while `is_now` is set."""

    is_now = False

    def forward(self, output, y=None):
        return super().forward(output) if y is None else nn.functional.cross_entropy(output, y) + self.penalty(output)

    def penalty(self, x):
        broken = self.is_now and dist.get_rank() == dist.get_world_size() - 1
        return x.sum() * (float("nan") if broken else 0.0)


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
    torch.manual_seed(0)
    model = partnets.partition(nn.Sequential(Remembers(), nn.Linear(6, 2)), (0.6, 0.2, 0.2)).double()
    one = distributed.Trainer(model, partnets.chunk(examples(), (0.6, 0.2, 0.2)), batch_size=16)
    try:
        one.fit(1)
    except (ValueError, RuntimeError) as error:
        return str(error)


def test_a_leak_that_one_rank_alone_finds_is_told_on_all(two_ranks):
    first, last = two_ranks(leak_on_one_rank)
    assert "0.mean follows the data" in last and first.startswith("rank 1 raised ValueError: this model carries")


def not_finite(part, sharded):
    """Return whether ψ changes, whether w changes, and whether all is finite, after a step with NaN on one rank."""
    broken = Broken()
    options = {"loss": nn.functional.cross_entropy} | ({part: broken} if part != "penalty" else {})
    one = trainer(distributed.Trainer, sharded=sharded, lml_every=None, keep_best=False, **options)
    if part == "penalty":
        one.model[4].register_forward_hook(lambda module, x, output: broken(output))
    one.fit(2)
    one.settings.audit, broken.is_now = False, True
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


def sharded_ahead():
    torch.manual_seed(0)
    network = nn.Linear(6, 3)
    model = partnets.partition(nn.Sequential(network, decay := hyper.WeightDecay(network)), (0.6, 0.2, 0.2))
    distributed.fully_shard(model, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
    with pytest.raises(ValueError, match="1 learns by looking ahead, which needs whole weights"):
        distributed.Trainer(model, partnets.chunk(examples(), (0.6, 0.2, 0.2)), hyper=decay)


def test_looking_ahead_of_a_sharded_model_is_refused(two_ranks):
    two_ranks(sharded_ahead)


def earlier_partitions(changed, sharded):
    """Return the weights of partitions 1 and 2, and of 3, after training with `changed` examples of D_3 changed."""
    one = trainer(distributed.Trainer, hyper=[], sharded=sharded)
    x, _ = one.chunks.dataset.tensors
    x[one.chunks.indices(3)[:changed]] += 1
    one.fit(15)
    weight, rows = whole(one.model[1].weight), one.model[1].bias_rows
    last = partnets.partitions(one.model)["1.weight"].mask(3)
    return [weight[~last], rows[:2]], [weight[last], rows[2]]


@pytest.mark.parametrize("sharded", [False, True])
def test_examples_of_a_later_chunk_never_reach_earlier_partitions_on_any_rank(sharded, two_ranks):
    for (early, late), (same, other) in zip(
        two_ranks(earlier_partitions, 0, sharded), two_ranks(earlier_partitions, 5, sharded), strict=True
    ):
        assert all(map(torch.equal, early, same))
        assert not any(map(torch.equal, late, other))


def save(path, steps):
    one = trainer(distributed.Trainer)
    one.fit(steps)
    one.save(path)


def load(path, steps):
    one = trainer(distributed.Trainer)
    one.load(path)
    one.fit(steps)
    return learned(one)


@pytest.mark.full
def test_what_two_ranks_saved_goes_on_in_one_process_and_the_other_way_round(two_ranks, tmp_path):
    whole = trainer(partnets.Trainer)
    whole.fit(12)
    expected = learned(whole)

    two_ranks(save, tmp_path / "two.pt", 6)
    one = trainer(partnets.Trainer)
    one.load(tmp_path / "two.pt")
    one.fit(6)
    torch.testing.assert_close(learned(one), expected, rtol=1e-9, atol=1e-11)

    one = trainer(partnets.Trainer)
    one.fit(6)
    one.save(tmp_path / "one.pt")
    for found in two_ranks(load, tmp_path / "one.pt", 6):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


def resume(path):
    """Compare an uninterrupted run with one from its checkpoint, with different noise on each rank."""
    whole = trainer(distributed.Trainer, dropout=0.3)
    torch.manual_seed(dist.get_rank())
    whole.fit(5)
    whole.save(path)
    whole.fit(5)
    resumed = trainer(distributed.Trainer, dropout=0.3)
    torch.manual_seed(99)
    resumed.load(path)
    resumed.fit(5)
    noise = torch.get_rng_state()
    return all(map(torch.equal, learned(resumed), learned(whole))), noise


def test_ranks_that_resume_have_the_bits_of_an_uninterrupted_run_and_each_its_own_noise(two_ranks, tmp_path):
    (first, noise), (second, other) = two_ranks(resume, tmp_path / "checkpoint.pt")
    assert first and second and not torch.equal(noise, other)


def construct_with(options):
    trainer(distributed.Trainer, **{name: values[dist.get_rank()] for name, values in options.items()})


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"seed": (0, 1)}, "the seed"),
        ({"lml_every": (4, 8)}, "lml_every"),
        ({"patience": (3, 4)}, "patience"),
        ({"batch_size": (16, 8), "hyper_every": (1, 2)}, "batch_size, hyper_batch_size"),
    ],
)
def test_ranks_whose_trainers_differ_are_refused(options, named, two_ranks):
    with pytest.raises(AssertionError, match=f"ValueError: the ranks differ in {named}.*; construct the same model"):
        two_ranks(construct_with, options)


def construct_with_settings(name, setting, values):
    """Construct a trainer with an optimiser or scheduler that has different settings on each rank."""
    torch.manual_seed(0)
    model = partnets.partition(nn.Sequential(mask := hyper.InputMask(6), nn.Linear(6, 2)), (0.6, 0.2, 0.2))
    own = {setting: values[dist.get_rank()]}
    optimizer = optim.Adam(model, **own) if name == "optimizer" else optim.Adam(model)
    options = {"optimizer": optimizer}
    if name == "hyper_optimizer":
        options[name] = torch.optim.Adam(mask.parameters(), **own)
    if name == "scheduler":
        options[name] = torch.optim.lr_scheduler.StepLR(optimizer, 10, **own)
    distributed.Trainer(model, partnets.chunk(examples(), (0.6, 0.2, 0.2)), hyper=mask, batch_size=16, **options)


@pytest.mark.parametrize(
    ("name", "setting", "values", "named"),
    [
        ("optimizer", "lr", (0.01, 0.02), r"optimizer\.param_groups\.0\.lr"),
        ("optimizer", "betas", ((0.9, 0.999), (0.9, 0.99)), r"optimizer\.param_groups\.0\.betas\.1"),
        (
            "hyper_optimizer",
            "lr",
            (torch.tensor(0.01), torch.tensor(0.0100001)),
            r"hyper_optimizer\.param_groups\.0\.lr",
        ),
        ("scheduler", "gamma", (0.1, 0.5), r"scheduler\.gamma"),
    ],
)
def test_ranks_whose_optimizers_differ_are_refused(name, setting, values, named, two_ranks):
    with pytest.raises(AssertionError, match=f"ValueError: the ranks differ in {named}; construct the same model"):
        two_ranks(construct_with_settings, name, setting, values)


def construct_with_a_schedule_of_a_function():
    model = partnets.partition(nn.Linear(6, 2), (0.6, 0.2, 0.2))
    optimizer = optim.SGD(model, lr=0.1)
    optimizer.param_groups[0]["of the user"] = object()  # its repr differs on each rank
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    chunks = partnets.chunk(examples(), (0.6, 0.2, 0.2))
    distributed.Trainer(model, chunks, optimizer=optimizer, scheduler=scheduler, batch_size=16)


def test_settings_that_are_no_plain_values_are_not_compared(two_ranks):
    two_ranks(construct_with_a_schedule_of_a_function)


@pytest.mark.parametrize("name", ["batch_size", "hyper_batch_size"])
def test_sizes_that_ranks_cannot_share_are_refused_by_their_names(name, two_ranks):
    with pytest.raises(AssertionError, match=f"ValueError: {name}=21 cannot be shared by 2 ranks; pass a multiple"):
        two_ranks(construct_with, {name: (21, 21)})


def test_parts_that_ranks_cannot_share_are_refused(two_ranks):
    with pytest.raises(AssertionError, match="divides the batches into 10, 3, 3, 8, 8 examples, which 2 ranks"):
        two_ranks(construct_with, {"one_pass": (True, True)})


def save_where_nothing_can_be(path):
    try:
        trainer(distributed.Trainer).save(path)
    except OSError as error:
        return type(error)


def test_all_ranks_raise_if_the_file_cannot_be_written(two_ranks, tmp_path):
    (tmp_path / "file").touch()
    assert two_ranks(save_where_nothing_can_be, tmp_path / "file" / "checkpoint.pt") == [NotADirectoryError] * 2
