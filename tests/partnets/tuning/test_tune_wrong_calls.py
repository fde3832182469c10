"""Wrong calls of tune are refused before training, with a cure."""

import functools
import math

import numpy
import pytest
import torch
import torch.nn.functional as F
from small_calls import FAST, Rows, X, Y, classifier, labelled, pictures, tuned
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

import partnets
from partnets import hyper

MANY = labelled(300)
BINARY, IMAGES = (X[:, :3] > 0).long(), torch.rand(60, 8, 8)
NAN = torch.cat([X[:-1], torch.full_like(X[:1], math.nan)])


def flat():
    """Return a network with outputs [n]."""
    return nn.Sequential(classifier(1), nn.Flatten(0))


class Squashed(nn.Sequential):
    """A network with a sigmoid that is no module."""

    def __init__(self):
        super().__init__(*classifier(1))

    def forward(self, x):
        return super().forward(x).sigmoid()


class Scaled(nn.Module):
    """A loss with a trainable parameter."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, output, y):
        return self.scale * F.cross_entropy(output, y)


class Locked(nn.Sequential):
    """A network that cannot be copied."""

    def __init__(self):
        super().__init__(*classifier())
        self.generator = (i for i in range(3))


class Undeployable(hyper.Hyperparameter):
    """A hyperparameter without a counterpart in torch."""

    def __init__(self):
        super().__init__()
        self.strength = hyper.Learned(0.5, hyper.positive)

    def forward(self, x):
        return x + self.strength() * torch.randn_like(x)


def scheduled(parameters):
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    schedule = lr_scheduler.LinearLR(optimizer)
    optimizer.register_step_post_hook(lambda *_: schedule.step())
    return optimizer


NETWORK, MASKS, AFFINE = classifier(), [hyper.InputMask(4), hyper.InputMask(4)], hyper.Affine()
RATE = hyper.LearningRate(NETWORK, 0.01)
OTHER = torch.optim.Adam(NETWORK.parameters())
FEW = functools.partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=4)
ALL = functools.partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=7)
PAIRS = [{"image": x, "table": x, "label": y} for x, y in zip(X, Y, strict=True)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps"),
        ({"budget": 1.0}, r"budget=1\.0; pass a number above 1"),
        ({"budget": "2"}, "budget='2'; pass a number above 1"),
        ({"clip": -1.0}, r"clip=-1\.0"),
        ({"proportions": (1.0,)}, "pass two or more"),
        ({"resume_from": 3}, "not int"),
        ({"forward": 3}, "forward is of type int; pass a function of the network and a batch"),
        ({"collate": 3}, "collate is of type int; pass a function"),
        ({"callbacks": [3]}, "callbacks is of type int; pass a function of a training"),
        ({"callbacks": 3}, "callbacks is of type int"),
        # Names and modules.
        ({"names": []}, "hyper is empty; pass names: 'dropout'"),
        ({"names": ["droput"]}, "hyper has 'droput'; the names are 'dropout'"),
        ({"names": ["dropout", "dropout:one"]}, "pass one of them"),
        ({"names": ["weight_decay", "weight_decay"]}, "weight_decay twice"),
        ({"names": [0.5]}, "hyper has a float"),
        ({"names": {"dropout": (0.0, 0.5)}}, r"hyper is a dict; .* such as \['dropout'\]: each has its own range"),
        ({"names": [hyper.Temperature()]}, "Temperature acts on predictions; put it behind the network"),
        ({"names": [hyper.ObservationNoise()]}, "ObservationNoise acts on predictions; put it behind the network"),
        ({"names": [Undeployable()]}, "Undeployable"),
        ({"names": [hyper.WeightDecay(nn.Linear(4, 4))]}, "changes nothing in 3 training steps; leave it out of hyper"),
        ({"names": [hyper.InputNoise(-3.0, range=hyper.real)]}, "std=-3 in a range without a lowest value"),
        ({"names": [RATE], "proportions": (0.6, 0.2, 0.2)}, "which only partnets.optim follows; .*'learning_rate'"),
        ({"network": nn.Sequential(classifier(), RATE)}, "has a LearningRate"),
        ({"names": [AFFINE]}, r"first training step fails.* x is \[\d+, 4\].* Augmentations take images"),
        ({"names": [AFFINE], "network": nn.Sequential(AFFINE, pictures()[0]), "data": pictures()[1]},
         r"0 \(Affine\) acts in prediction too; .* hyper\.InTraining\(Affine\(\.\.\.\)\)"),
        ({"names": [AFFINE], "data": PAIRS}, r"put them into it, such as hyper\.InTraining\(hyper\.Affine"),
        ({"names": MASKS, "network": nn.Sequential(*MASKS, classifier())}, "several numbers called 0, 1, 2, 3"),
        ({"names": ["dropout"], "network": nn.Linear(4, 3)}, r"no nn\.Dropout in training mode; put nn\.Dropout\(0\.1"),
        ({"names": ["label_smoothing"], "network": classifier(1), "data": (X, X[:, :1])},
         "'label_smoothing', which needs torch's cross-entropy"),
        # Networks.
        ({"network": "resnet"}, "network is a str"),
        ({"network": classifier().requires_grad_(False)}, "no parameter .* requires a gradient"),
        ({"network": classifier().to("meta")}, "on the meta device"),
        ({"device": "cudaa"}, "device='cudaa' cannot be used here"),
        ({"network": nn.LazyLinear(3)}, "without numbers; call it once on a batch if it has lazy modules"),
        ({"network": partnets.partition(classifier(), (0.8, 0.2))}, "is partitioned; pass the plain one"),
        ({"network": Locked()}, "network cannot be copied"),
        ({"network": nn.Linear(5, 3)}, r"\(16x4 and 5x3\)\. x is \[16, 4\] of torch\.float32"),
        ({"network": nn.LSTM(4, 3), "loss": nn.CrossEntropyLoss()}, "first training step fails: .*tuple"),
        ({"network": nn.Bilinear(4, 4, 3), "data": (X, X, Y)}, "an example has 3 parts; .* forward="),
        ({"network": nn.Bilinear(4, 4, 3), "data": [((x, x), y) for x, y in zip(X, Y, strict=True)]},
         r"pass forward=lambda network, batch: \(network\(\*batch\[0\]\), batch\[1\]\)"),
        ({"forward": lambda network, batch: network(batch[0])}, "forward returned a Tensor; return the"),
        # Optimizers and schedulers.
        ({"optimizer": "adam"}, "optimizer is of type str; pass a function of a list of parameters"),
        ({"optimizer": OTHER}, "optimizer is of type Adam; pass a function of a list of parameters"),
        ({"optimizer": lambda _: OTHER}, "steps 4 parameters that it was not given"),
        ({"optimizer": lambda parameters: FAST(parameters[-2:]), "proportions": (0.6, 0.2, 0.2)},
         r"optimizer makes groups of \[2\] of 4 parameters; more than two chunks take one group of all"),
        ({"optimizer": lambda parameters: None}, "optimizer returned a NoneType"),
        ({"optimizer": torch.optim.LBFGS}, "weight_decay', which LBFGS does not take"),
        ({"optimizer": torch.optim.LBFGS, "names": ["dropout"]}, "first training step fails: .*closure"),
        ({"optimizer": scheduled, "names": ["learning_rate"]}, "pass the scheduler as scheduler="),
        ({"optimizer": functools.partial(torch.optim.SGD, lr=0.0), "names": ["learning_rate"]},
         "has a learning rate of 0; pass one above 0"),
        ({"optimizer": functools.partial(torch.optim.AdamW, lr=0.0)}, "with which its weight decay does nothing"),
        ({"scheduler": ALL, "names": ["learning_rate"]}, "learning_rate changes nothing, as the scheduler sets it"),
        ({"scheduler": FEW}, "the scheduler fails after 4 of 6 steps: Tried to step 5"),
        ({"scheduler": lambda _: lr_scheduler.StepLR(FAST([nn.Parameter(X)]), 3)}, "of another optimizer"),
        ({"scheduler": lr_scheduler.StepLR}, "step_size"),
        ({"scheduler": lr_scheduler.ReduceLROnPlateau}, "a ReduceLROnPlateau; return one that steps without"),
        # Losses.
        ({"loss": "cross_entropy"}, "loss is of type str; pass a function of outputs and targets"),
        ({"loss": nn.CrossEntropyLoss}, r"loss is the class CrossEntropyLoss; pass .*CrossEntropyLoss\(\)"),
        ({"loss": lambda output, y: output.detach().mean()}, "first training step fails: .*require grad"),
        ({"loss": Scaled()}, "the loss has 1 parameters that are not in the network"),
        ({"loss": nn.HuberLoss(), "network": classifier(1), "data": (X, X[:, 0])},
         r"which HuberLoss broadcasts; pass targets\.unsqueeze\(1\)"),
        ({"loss": lambda o, y: (o - y).square().mean(), "network": classifier(1), "data": (X, X[:, 0])},
         r"it broadcasts them; pass targets\.unsqueeze\(1\)"),
        ({"loss": nn.BCEWithLogitsLoss(), "data": (X, BINARY)}, r"torch\.int64, \[16, 3\].*pass labels\.float\(\)"),
        # Data.
        ({"data": X}, r"tensors \(x, y\)"),
        ({"data": DataLoader(TensorDataset(X, Y))}, r"pass loader\.dataset.* collate="),
        ({"data": (X.to_sparse(), Y)}, "layout torch.sparse_coo; pass dense ones"),
        ({"data": (X.numpy(), numpy.array(["a", "b"] * 30))}, "an array of <U1; pass numbers"),
        ({"data": (NAN, Y)}, r"1 of 60 examples have NaN or infinite .* loss .* is nan; .*nan_to_num"),
        ({"data": (X, NAN[:, :1]), "network": classifier(1)}, "1 of 60 examples have NaN"),
        ({"data": (IMAGES, Y), "network": nn.Conv2d(1, 2, 3)}, r"Images need a dimension for their channels: x\.unsq"),
        ({"data": (torch.rand(60, 8, 8, 3), Y), "network": nn.Sequential(nn.Flatten(), nn.Linear(192, 3)),
          "names": [hyper.Affine()]}, r"\[2, 8, 8, 3\], and augmentations take.*pass x\.permute\(0, 3, 1, 2\)"),
        ({"data": (torch.rand(60, 8, 8, 3), Y), "network": nn.Conv2d(3, 2, 3)}, r"pass x\.permute\(0, 3, 1, 2\)"),
        ({"data": (torch.ones(60, 4, dtype=torch.uint8), Y)}, r"pass x\.float\(\) / 255"),
        ({"data": Rows(X, Y.int())}, r"labels are torch\.int32; pass labels\.long\(\)"),
        ({"data": Rows(X.double(), Y)}, r"The network has torch\.float32: pass x\.to\(torch\.float32\)"),
        ({"data": (X, Y[:, None])}, r"the labels are \[16, 1\], of logits \[16, 3\]; pass labels\.squeeze\(1\)"),
        ({"data": (X, Y + 1)}, "the labels are 1 to 3, and the network has 3 outputs"),
        ({"data": (MANY[0], MANY[1].index_fill(0, torch.tensor([150]), 3))}, "are 0 to 3, and the network has 3"),
        ({"data": (X, Y.bool())}, r"torch\.bool.*pass labels\.long\(\)"),
        ({"data": (X, Y % 2), "network": classifier(1)},
         r"a single output.*pass labels\.float\(\)\.reshape\(-1, 1\).* an output for each class"),
        ({"data": (X, (Y % 2)[:, None]), "network": classifier(1)},
         r"a single output.*pass labels\.float\(\) with loss=F\.binary"),
        ({"data": (X, Y == 1), "network": classifier(1)}, r"a single output.*labels\.float\(\)\.reshape\(-1, 1\)"),
        ({"data": (X, Y % 2), "network": flat()}, r"a single output.*pass labels\.float\(\) with loss=F\.binary"),
        ({"data": (X, Y == 1), "network": flat()}, r"a single output.*pass labels\.float\(\) with loss=F\.binary"),
        ({"data": (X, BINARY > 0)}, r"torch\.bool, \[16, 3\].*pass labels\.float\(\)"),
        ({"data": (X, BINARY)}, r"torch\.int64, \[16, 3\].*pass labels\.float\(\)"),
        ({"data": (X, F.one_hot(Y, 3).float())}, r"has a single one: pass y\.argmax\(1\)"),
        ({"data": (X, F.one_hot(Y % 2, 2).float()), "network": classifier(2)}, r"has a single one: pass y\.argmax"),
        ({"data": (X, X[:, 0]), "network": classifier(1)}, r"mse_loss broadcasts; pass targets\.unsqueeze\(1\)"),
        ({"network": nn.Sequential(classifier(), nn.Softmax(1))}, "outputs are probabilities.*leave out the softmax"),
        ({"data": (X, (X[:, :1] > 0).float()), "network": nn.Sequential(classifier(1), nn.Sigmoid())},
         "ends in a sigmoid, and binary_cross_entropy_with_logits takes logits"),
        ({"data": (X, (X[:, :1] > 0).float()), "network": Squashed()}, "ends in a sigmoid, and binary_cross_entropy"),
        ({"names": [hyper.Affine]}, r"hyper has the class Affine; pass an instance, such as Affine\(\)"),
        ({"data": (Y[:, None].expand(60, 4),) * 2, "network": nn.Embedding(9, 4)},
         "either the second or the last dimension may be the classes; pass loss="),
    ],
)  # fmt: skip
def test_wrong_calls_are_refused_before_training(options, message):
    called = []
    with pytest.raises((ValueError, TypeError), match=message):
        tuned(**({"names": ["weight_decay"], "callbacks": [called.append]} | options))
    assert not called


def test_weights_that_know_the_labels_warn():
    network = classifier()
    optimizer = torch.optim.Adam(network.parameters(), lr=0.05)
    for _ in range(200):
        optimizer.zero_grad()
        F.cross_entropy(network(X), Y).backward()
        optimizer.step()
    with pytest.warns(UserWarning, match="before its first step, subnetwork 1 predicts labels of chunk 2 with a loss"):
        tuned(network=network, names=["weight_decay"])


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu")])
def test_a_call_without_gradients_or_in_autocast_is_refused(context):
    with context(), pytest.raises(RuntimeError, match=r"gradients are disabled here|within torch\.autocast"):
        tuned()


def test_hyperparameters_of_a_loss_that_is_not_used_warn():
    mixup = hyper.Mixup()
    with pytest.warns(UserWarning, match="acts only in the training loss, but the loss is another one"):
        tuned(names=[mixup])
    assert tuned(names=[mixup], loss=mixup.loss).history
