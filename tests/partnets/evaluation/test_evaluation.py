"""Means are over examples for any batch size, L_ML is next to the loss matrix's diagonal, and modes are restored."""

import functools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, Subset, TensorDataset

import partnets
from partnets import accuracy, lml, loss_matrix, mean_loss, per_subnetwork
from partnets.subnetworks.parameters import partitioned_parameters
from partnets.subnetworks.state import state_of

PROPORTIONS = (0.5, 0.3, 0.2)
BATCH_SIZES = [1, 7, 256]


class Rows(Dataset):
    """A map-style data set with Python numbers as labels."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], int(self.y[i])


class NegatedSubset(Subset):
    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return -x, y

    def __getitems__(self, indices):  # required by PyTorch
        return [self[i] for i in indices]


DATA = {
    "tensors": lambda x, y: (x, y),
    "list": lambda x, y: [x, y],
    "Dataset": Rows,
    "a Subset that transforms": lambda x, y: NegatedSubset(TensorDataset(-x, y), range(len(y))),
}


def examples(n=31):
    return torch.randn(n, 3), torch.randint(4, (n,))


def network():
    return nn.Sequential(nn.Linear(3, 7), nn.Dropout(0.5), nn.BatchNorm1d(7), nn.Linear(7, 4))


def partitioned():
    model = partnets.partition(nn.Sequential(nn.Linear(3, 7), nn.Dropout(0.5), nn.Linear(7, 4)), PROPORTIONS)
    for one in partitioned_parameters(model):
        nn.init.normal_(one.stored)
        one.combine()
    return model


def by_numpy(model, x, y):
    """Return the mean negative log-likelihood and the accuracy, computed from logits with NumPy."""
    logits = model.eval()(x).detach().double().numpy()
    likelihoods = np.exp(logits)[np.arange(len(y)), y.numpy()] / np.exp(logits).sum(1)
    return -np.log(likelihoods).mean(), (logits.argmax(1) == y.numpy()).mean()


@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize("batch_size", BATCH_SIZES)
def test_means_are_over_examples_whatever_the_batches_and_the_dataset(kind, batch_size):
    model, (x, y) = network(), examples()
    loss, share = by_numpy(model, x, y)
    model.train()
    data = DATA[kind](x, y)
    assert mean_loss(model, data, batch_size=batch_size) == pytest.approx(loss, rel=1e-5)
    assert accuracy(model, data, batch_size=batch_size) == pytest.approx(share, rel=1e-5)


def test_a_nan_logit_makes_accuracy_nan_unless_its_label_is_ignored():
    logits, y = torch.eye(4), torch.arange(4)
    logits[2, 0] = torch.nan
    assert math.isnan(accuracy(nn.Identity(), (logits, y)))
    assert accuracy(nn.Identity(), (logits, y.where(y != 2, -100))) == 1.0


@pytest.mark.parametrize("evaluate", [mean_loss, accuracy])
@pytest.mark.parametrize("fails", [False, True])
def test_evaluation_and_its_errors_keep_modes_gradients_and_statistics(evaluate, fails):
    model, (x, y) = network().train(), examples()
    model[1].eval()
    modes = [module.training for module in model.modules()]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if fails:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            evaluate(model, (x[:, :2], y))
    else:
        evaluate(model, (x, y))
    assert [module.training for module in model.modules()] == modes == [True, True, False, True, True]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_metrics_of_subnetworks_equal_those_of_merged_models():
    model, data = partitioned(), examples()
    expected = [by_numpy(partnets.merge(model, k), *data)[1] for k in (1, 2, 3)]
    assert len(set(expected)) > 1
    model.train()
    assert per_subnetwork(model, lambda model: accuracy(model, data)) == pytest.approx(expected)
    assert state_of(model[0]).active == state_of(model[0]).update == 3


@pytest.mark.parametrize("batch_size", [4, 256])
@pytest.mark.parametrize("loss", [F.cross_entropy, lambda logits, y: (logits[:, 0] - y).square().mean()])
def test_the_loss_matrix_is_each_merged_subnetwork_on_each_chunk(loss, batch_size):
    (x, y), model = examples(), partitioned()
    chunks = partnets.chunk((x, y), PROPORTIONS)
    matrix = loss_matrix(model, chunks, loss, batch_size=batch_size)
    assert matrix.shape == (3, 3) and matrix.dtype == torch.float64
    for k in (1, 2, 3):
        whole = partnets.merge(model, k).eval()
        for j in (1, 2, 3):
            chunk = chunks.indices(j)
            assert matrix[k - 1, j - 1].item() == pytest.approx(loss(whole(x[chunk]), y[chunk]).item(), rel=1e-5)


def test_a_loss_that_draws_is_tried_without_a_trace():
    data, model, drawn = examples(), partitioned(), []

    def loss(logits, y):
        drawn.append(torch.rand(()).item())
        return F.cross_entropy(logits, y)

    torch.manual_seed(0)
    mean_loss(model, data, loss, batch_size=4)
    drawn.append(torch.rand(()).item())
    torch.manual_seed(0)
    # Each batch has one number; other calls, which look for a sum and count targets, draw the next one too early.
    assert list(dict.fromkeys(drawn)) == [torch.rand(()).item() for _ in range(0, len(data[1]) + 4, 4)]


def test_lml_sums_the_losses_right_of_the_diagonal():
    model, chunks = partitioned(), partnets.chunk(examples(), PROPORTIONS)
    matrix = loss_matrix(model, chunks)
    expected = -sum(chunks.sizes[k - 1] * matrix[k - 2, k - 1] for k in (2, 3))
    assert partnets.lml(model, chunks) == pytest.approx(expected.item(), rel=1e-12)


class InDict(nn.Module):
    def forward(self, x):
        return {"logits": x}


@pytest.mark.parametrize(
    "loss",
    [
        torch.compile(F.cross_entropy, backend="eager"),
        nn.CrossEntropyLoss().forward,
        functools.wraps(F.cross_entropy)(lambda *each: F.cross_entropy(*each)),
        functools.partial(nn.CrossEntropyLoss(ignore_index=0)),
    ],
)
def test_losses_around_those_of_torch_get_logits(loss):
    y = torch.tensor([0, 1, 2, 1, 0, 2])
    assert mean_loss(InDict(), (X * y[:, None], y), loss, batch_size=4) == pytest.approx(math.log(3))


def test_a_module_in_a_partial_is_used_as_the_module_itself():
    loss = nn.CrossEntropyLoss(label_smoothing=0.5)
    model, chunks = partitioned(), partnets.chunk(examples(), PROPORTIONS)
    assert lml(model, chunks, functools.partial(loss)) == lml(model, chunks, loss)


SUM = functools.partial(F.cross_entropy, reduction="sum")
X, Y = torch.ones(6, 3), torch.zeros(6, dtype=torch.int64)


def chunks(proportions=PROPORTIONS, n=31):
    return partnets.chunk(examples(n), proportions)


@pytest.mark.parametrize(
    ("use", "error", "message"),
    [
        *(
            (lambda loss=loss, judge=judge: judge(partitioned(), chunks(), loss), ValueError, "sum")
            for loss in (SUM, nn.CrossEntropyLoss(reduction="sum"), lambda *each: SUM(*each))
            for judge in (lml, loss_matrix)
        ),
        (lambda: mean_loss(network(), examples(), lambda *each: SUM(*each)), ValueError, "it is a sum"),
        (lambda: mean_loss(InDict(), (X, Y), lambda z, y: SUM(z["logits"], y)), ValueError, "it is a sum"),
        *(
            (lambda use=use: use(partitioned(), chunks((0.5, 0.5))), ValueError, "3 partitions and the data 2 chunks")
            for use in (loss_matrix, lml, partnets.estimate_statistics)
        ),
        (lambda: lml(partnets.partition(nn.Linear(3, 4), (1.0,)), chunks((1.0,))), ValueError, "at least 2"),
        (lambda: partnets.estimate_statistics(partitioned(), chunks(), examples=0), ValueError, "examples=0"),
        *(
            (lambda use=use: use(network(), (X[:0], Y[:0])), ValueError, "no example; pass at least one")
            for use in (mean_loss, accuracy)
        ),
        *(
            (lambda use=use: use(network(), (X, Y), batch_size=0), ValueError, "batch_size=0")
            for use in (mean_loss, accuracy)
        ),
        (lambda: mean_loss(network(), (X, Y[:4])), ValueError, "equal length"),
        (lambda: mean_loss(network(), X), TypeError, "pass a Dataset"),
        (lambda: mean_loss(network(), X, Y), TypeError, r"one argument: mean_loss\(model, \(x, y\), loss\)"),
        (lambda: accuracy(network(), X, Y), TypeError, r"one argument: accuracy\(model, \(x, y\)\)"),
        (lambda: mean_loss(network(), (X, Y), shuffle=True), TypeError, "mean_loss takes no shuffle"),
        (lambda: mean_loss(nn.Identity(), (X, Y - 100)), ValueError, "no target of these 6 examples counts"),
        (lambda: mean_loss(nn.Identity(), (X, Y), lambda *each: (SUM(*each), 0)), TypeError, "gave a tuple"),
        (lambda: accuracy(nn.LSTM(3, 2), (X, Y)), ValueError, "the output is a tuple without logits"),
        (lambda: accuracy(nn.Linear(3, 1), (X, Y)), ValueError, "of one class"),
        (lambda: accuracy(nn.Identity(), (X, Y[:, None])), ValueError, r"logits are \[6, 3\] and the labels \[6, 1\]"),
        (
            lambda: accuracy(nn.Identity(), (X, Y + 3)),
            ValueError,
            "has 3 classes; pass labels from 0, or ignore_index=",
        ),
        (lambda: accuracy(nn.Identity(), (X, Y + 254)), ValueError, "has 3 classes; pass labels from 0"),
        *(
            (
                lambda use=use: use(partitioned(), (X, Y)),
                TypeError,
                "are a tuple; split them first, with partnets.chunk",
            )
            for use in (partnets.Trainer, lml, loss_matrix, partnets.estimate_statistics)
        ),
        (lambda: partnets.Loader((X, Y), 2, steps=2), TypeError, "are a tuple; split them first"),
    ],
)
def test_wrong_calls_are_named(use, error, message):
    with pytest.raises(error, match=message):
        use()
