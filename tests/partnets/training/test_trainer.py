"""The trainer follows Appendix I.1, learns, records its steps, and rejects invalid arguments."""

import copy
import sys

import pytest
import torch
import torch.nn.functional as F
import tqdm.auto
from processes import run_python
from torch import nn
from torch.optim import lr_scheduler

import partnets
from partnets import hyper, optim
from partnets.subnetworks.state import state_of
from partnets.training.progress import BAR, Progress

PROPORTIONS = (0.8, 0.1, 0.1)


def examples(n=100):
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(2, (n,), generator=generator)
    x = torch.randn(n, 6, generator=generator)
    x[:, :2] += 2 * y[:, None]  # the other features are noise
    return x, y


def parts(seed=0, proportions=PROPORTIONS, width=9):
    mask = hyper.InputMask(6, temperature=0.5)
    model = nn.Sequential(mask, nn.Linear(6, width), nn.Dropout(0.1), nn.ReLU(), nn.Linear(width, 2))
    return partnets.partition(model, proportions, seed=seed), partnets.chunk(examples(), proportions), mask


def trainer(**arguments):
    model, chunks, mask = parts()
    return partnets.Trainer(model, chunks, **{"hyper": mask, "batch_size": 16, "lml_every": 5} | arguments)


def test_the_trainer_takes_the_steps_of_the_manual_loop_in_its_docstring():
    one = trainer(lml_every=None, seed=7)
    torch.manual_seed(3)
    one.fit(12)

    model, chunks, mask = parts()
    optimizer, hyper_optimizer = optim.Adam(model), torch.optim.Adam(mask.parameters(), lr=1e-3)
    torch.manual_seed(3)
    generator, u = torch.Generator().manual_seed(7), torch.tensor(chunks.proportions)
    for _ in range(12):
        k = 1 + int(torch.multinomial(u, 1, generator=generator))
        x, y = chunks.sample_upto(k, 16, generator)
        with partnets.subnetwork(model, active=k, update=k):
            F.cross_entropy(model(x), y).backward()
        optimizer.step(update=k)
        optimizer.zero_grad()
        hyper_optimizer.zero_grad()

        k = 2 + int(torch.multinomial(u[1:], 1, generator=generator))
        x, y = chunks.sample(k, 16, generator)
        with partnets.subnetwork(model, active=k - 1):
            F.cross_entropy(model(x), y).backward()
        hyper_optimizer.step()
        hyper_optimizer.zero_grad()
    assert all(map(torch.equal, one.model.parameters(), model.parameters()))


def test_a_step_of_one_kind_changes_nothing_of_the_other():
    one = trainer()
    weights = [p for name, p in one.model.named_parameters() if not name.startswith("0.")]
    (psi,) = one.model[0].parameters()
    before = [p.detach().clone() for p in weights]
    one.step_hyper()
    assert all(map(torch.equal, weights, before)) and all(p.grad is None for p in weights)
    psi_before = psi.detach().clone()
    psi.grad = None
    one.step_weights()
    assert torch.equal(psi, psi_before) and psi.grad is None and psi.requires_grad
    assert not all(map(torch.equal, weights, before))


def test_without_hyperparameters_only_the_weights_learn():
    one = trainer(hyper=[], lml_every=None)
    psi = one.model[0].logits.detach().clone()
    one.fit(3)
    assert torch.equal(one.model[0].logits, psi) and one.hyper_optimizer is None
    assert one.history.steps["hyper_k"] == [None] * 3 and one.history.values == {}


def test_running_statistics_of_a_skipped_module_stay():
    norm = nn.BatchNorm1d(6).requires_grad_(False)
    model = partnets.partition(nn.Sequential(norm, nn.Linear(6, 2)), PROPORTIONS, skip=[norm])
    partnets.Trainer(model, partnets.chunk(examples(), PROPORTIONS)).fit(2)
    assert (norm.running_mean == 0).all() and model[1].training and norm.num_batches_tracked == 0


class Running(nn.Module):
    """A module that subtracts a running mean and is not one of torch's norms."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        if self.training:
            self.mean.lerp_(x.mean(0), 0.1)
        return x - self.mean


def test_modules_in_evaluation_mode_stay_in_it():
    norm = Running().eval()
    model = partnets.partition(nn.Sequential(norm, nn.Linear(6, 2)), PROPORTIONS, skip=[norm])
    one = partnets.Trainer(model, partnets.chunk(examples(), PROPORTIONS))
    one.fit(2)
    one.step()
    assert (norm.mean == 0).all() and model[1].training and not norm.training


def test_lml_is_evaluated_with_the_same_noise_each_time():
    torch.manual_seed(0)
    augmentation = hyper.Affine(rotation=90.0)
    model = partnets.partition(nn.Sequential(augmentation, nn.Flatten(), nn.Linear(36, 2)), (0.5, 0.5))
    chunks = partnets.chunk((torch.rand(40, 1, 6, 6), torch.randint(2, (40,))), (0.5, 0.5))
    options = {"hyper": [], "lml_every": 1, "keep_best": True, "patience": 3}
    one = partnets.Trainer(model, chunks, optimizer=optim.SGD(model, lr=0.0), **options)
    history = one.fit(10)
    assert history.lml["step"] == [1, 2, 3, 4] and len(set(history.lml["lml"])) == 1
    assert one.best.step == 1 and history.lml["lml"][0] == partnets.lml(model, chunks, batch_size=128, seed=0)


class Unused(hyper.Hyperparameter):
    def __init__(self):
        super().__init__()
        self.value = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return x

    def values(self):
        return {"value": self.value.item()}


def test_a_hyperparameter_that_gets_no_gradient_is_named():
    unused = Unused()
    model = partnets.partition(nn.Sequential(unused, nn.Linear(6, 2)), PROPORTIONS)
    with pytest.raises(RuntimeError, match=r"gives 0\.value no gradient"):
        partnets.Trainer(model, partnets.chunk(examples(), PROPORTIONS), hyper=unused).fit(1)


def frozen_mask():
    model, chunks, mask = parts()
    return partnets.Trainer(model, chunks, hyper=mask.requires_grad_(False))


def part_of_the_model():
    model = partnets.partition(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2)), PROPORTIONS)
    return partnets.Trainer(model, partnets.chunk(examples(), PROPORTIONS), optimizer=optim.Adam(model[1]))


def held_out():
    return partnets.Trainer(*partnets.held_out(nn.Linear(6, 2), examples()))


def plateau():
    model, chunks, _ = parts()
    optimizer = optim.Adam(model)
    return partnets.Trainer(
        model, chunks, hyper=[], optimizer=optimizer, scheduler=lr_scheduler.ReduceLROnPlateau(optimizer)
    )


def closure():
    model, chunks, mask = parts()
    return partnets.Trainer(model, chunks, hyper=mask, hyper_optimizer=torch.optim.LBFGS(mask.parameters()))


def other_schedule():
    return lr_scheduler.StepLR(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1), 3)


@pytest.mark.parametrize(
    ("construct", "message"),
    [
        (lambda: trainer(batch_size=0), "batch_size"),
        (lambda: trainer(hyper_batch_size=-1), "batch_size"),
        (lambda: trainer(lml_every=0), "lml_every"),
        (lambda: trainer(seed=-1), "seed"),
        (lambda: trainer(keep_best=True, lml_every=None), "pass lml_every"),
        (lambda: trainer(patience=2, lml_every=None), "pass lml_every"),
        (lambda: trainer(patience=True), "patience=True"),
        (lambda: trainer(sampling=(1, 0)), r"sampling=\(1.0, 0.0\); pass 3 probabilities"),
        (lambda: trainer(sampling=(0.5, 1.0, -0.5)), "pass 3 probabilities"),
        (lambda: trainer(sampling=(0, 0, 0)), "pass 3 probabilities"),
        (lambda: trainer(sampling=(1, 0, float("nan"))), "pass 3 probabilities"),
        (lambda: trainer(clip=0), "clip=0; pass the greatest norm"),
        (lambda: trainer(clip=float("nan")), "clip=nan"),
        (lambda: trainer(hyper_every=1.5), "hyper_every=1.5; pass an int, at least 1"),
        (lambda: trainer(hyper_after=-1), "hyper_after=-1; pass an int, at least 0"),
        (lambda: trainer(one_pass="no"), "one_pass='no'; pass True or False"),
        (lambda: trainer(one_pass=True, batch_size=3), "batch_size=3, divided by 0.8, 0.1, 0.1, leaves no example for"),
        (lambda: trainer(hyper_gradient="ahead"), "hyper_gradient='ahead'; pass 'direct', 'lookahead'"),
        (lambda: trainer(hyper_gradient={hyper.InputMask(6): "direct"}), "has a InputMask, which is not in hyper"),
        (lambda: trainer(loss=nn.CrossEntropyLoss(reduction="sum")), "reduction='sum'"),
        (lambda: trainer(loss=nn.CrossEntropyLoss(reduction="sum"), hyper=[], lml_every=None), "reduction='sum'"),
        (held_out, r"partition 2 has no parameter .* \(1\.0, 0\.0\)"),
        (plateau, "ReduceLROnPlateau, which needs a metric"),
        (lambda: trainer(scheduler=other_schedule()), "^scheduler belongs to another optimiser"),
        (lambda: trainer(hyper_scheduler=other_schedule()), "^hyper_scheduler belongs to another optimiser"),
        (lambda: trainer(hyper_optimizer=torch.optim.LBFGS([torch.zeros(1)])), "other parameters than hyper"),
        (closure, "hyper_optimizer is LBFGS, which needs a closure"),
        (lambda: trainer().fit(-1), "steps"),
        (lambda: trainer().fit(2.5), "steps=2.5; pass an int"),
        (part_of_the_model, "optimizer lacks 0.weight, 0.bias, which would never learn"),
        (
            lambda: partnets.Trainer(parts()[0], partnets.chunk(examples()[:1], PROPORTIONS), hyper=[]).fit(1),
            "has 1 parts",
        ),
        (lambda: trainer(hyper=nn.Linear(2, 2)), "derive it from"),
        (lambda: trainer(hyper=hyper.InputMask(6)), "not inside the model"),
        (frozen_mask, "without a trainable parameter"),
        (lambda: trainer(optimizer=torch.optim.SGD([torch.zeros(1)])), r"partnets\.optim"),
        (lambda: trainer(optimizer=optim.Adam(parts()[0])), "another model"),
        (lambda: trainer(hyper_optimizer=torch.optim.SGD([torch.zeros(1)])), "other parameters than hyper"),
        (lambda: trainer(hyper=[], hyper_optimizer=torch.optim.SGD([torch.zeros(1)])), "other parameters than hyper"),
        (lambda: partnets.Trainer(parts()[0], partnets.chunk(examples(), (0.5, 0.5))), "3 partitions .* 2 chunks"),
        (
            lambda: partnets.Trainer(partnets.Linear(6, 2), partnets.chunk(examples(), (1.0,)), lml_every=1),
            "at least 2",
        ),
    ],
)
def test_invalid_trainer_arguments_raise(construct, message):
    with pytest.raises(ValueError, match=message):
        construct()


def test_progress_is_quiet_off_a_terminal_and_shows_values_on_one(capsys, monkeypatch):
    trainer().fit(5)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    trainer().fit(5)
    shown = capsys.readouterr().err
    for part in ("5/5 steps", "00:00 left", "loss ", "L_ML ", "0 0.5", ", 5 0.5"):
        assert part in shown


def test_progress_is_a_widget_in_a_notebook():
    assert issubclass(Progress, tqdm.auto.tqdm) and "{bar}" in BAR  # the part that a widget replaces


@pytest.mark.parametrize(("method", "library"), [("frame", "pandas"), ("plot", "matplotlib")])
def test_a_missing_library_is_named_with_the_cure(method, library, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == library]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ImportError, match=f"pip install {library}, or partkernels' extra 'plot'"):
        getattr(partnets.History(), method)()


def test_importing_partnets_imports_no_plotting_library():
    code = "import sys, partnets; assert not {'pandas', 'matplotlib'} & set(sys.modules)"
    run_python("-c", code, check=True)


def test_batch_parts_follow_settings_changed_by_a_callback():
    model, parts = partnets.partition(nn.Linear(4, 2), (0.8, 0.1, 0.1)), []

    def change(one):
        parts.append(dict(one._parts))
        if one.steps == 1:
            one.settings.sampling, one.settings.batch_size = (0.4, 0.2, 0.4), 50

    chunks = partnets.chunk((torch.randn(200, 4), torch.randint(2, (200,))), (0.8, 0.1, 0.1))
    partnets.Trainer(model, chunks, batch_size=30, one_pass=True, callbacks=[change]).fit(2)
    assert parts == [{1: 24, 2: 3, 3: 3}, {1: 20, 2: 10, 3: 20}]


def test_a_missing_hyper_argument_warns():
    model, chunks, _ = parts()
    with pytest.warns(UserWarning, match=r"the model has 0 \(InputMask\), but hyper= was not given"):
        partnets.Trainer(model, chunks)


def test_epochs_are_as_many_steps_as_the_data_have_batches():
    assert trainer(lml_every=None).fit(epochs=0.5).steps["step"][-1] == 4  # 50 of 100 examples, in batches of 16
    with pytest.raises(TypeError, match="fit takes steps or epochs; pass one of them"):
        trainer().fit()


@pytest.mark.parametrize(
    ("option", "cure"),
    [("lr", r"optimizer=partnets\.optim\.Adam"), ("epochs", r"fit\(steps\)"), ("device", r"model\.to\(device")],
)
def test_options_of_other_trainers_are_refused_with_a_cure(option, cure):
    with pytest.raises(TypeError, match=f"Trainer takes no {option}: .*{cure}"):
        trainer(**{option: 1})


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (lambda y: y[:, None], r"pass labels\.squeeze\(1\)"),
        (lambda y: y.float(), r"pass labels\.long\(\)"),
        (lambda y: y + 5, r"pass labels from 0 to"),
    ],
)
def test_labels_that_do_not_fit_are_refused_before_the_first_step(labels, message):
    model, _, mask = parts()
    x, y = examples()
    before = copy.deepcopy(model.state_dict())
    one = partnets.Trainer(model, partnets.chunk((x, labels(y)), PROPORTIONS), hyper=mask, audit=False)
    with pytest.raises(ValueError, match=message):
        one.fit(1)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items() if torch.is_tensor(value))


def test_optimizer_hooks_see_masked_gradients_and_all_partitions():
    model = partnets.partition(
        nn.Sequential(nn.Linear(4, 8, bias=False), nn.ReLU(), nn.Linear(8, 3, bias=False)), (0.5, 0.25, 0.25)
    )
    chunks = partnets.chunk((torch.randn(60, 4), torch.randint(3, (60,))), (0.5, 0.25, 0.25), seed=0)
    optimizer, seen = partnets.optim.SGD(model, lr=0.1), []

    def before(*_):
        ids = partnets.partitions(model)["0.weight"].ids()
        seen.append(len(ids[model[0].weight.grad != 0].unique()))

    def after(*_):
        seen.append(state_of(model[0]).active)
        with torch.no_grad():
            model[0].weight.clamp_(-0.05, 0.05)

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    partnets.Trainer(model, chunks, optimizer=optimizer, audit=False).fit(6)
    assert seen == [1, 3] * 6
    partition = partnets.partitions(model)["0.weight"]
    with partnets.subnetwork(model, 1):
        defaults = partition.defaults.values((8, 4))
        assert torch.equal(model[0].weight[~partition.mask(1)], defaults[~partition.mask(1)])


def test_gradients_within_a_loss_are_those_of_the_partition():
    def stepped(**options):
        torch.manual_seed(0)
        model = partnets.partition(nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3)), (0.5, 0.25, 0.25))
        x, y = torch.randn(9, 4), torch.randint(3, (9,))

        def loss(_):
            value = nn.functional.cross_entropy(model(x), y)
            grads = torch.autograd.grad(value, list(model.parameters()), create_graph=True)
            return value + 10 * sum(grad.square().sum() for grad in grads)

        partnets.step_weights(model, partnets.optim.SGD(model, lr=1.0), 2, None, loss, **options)
        return model

    for one, other in zip(stepped().parameters(), stepped(masked=True).parameters(), strict=True):
        torch.testing.assert_close(one, other)
