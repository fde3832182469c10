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
from partnets.evaluation.marginal_likelihood import lml
from partnets.evaluation.metrics import accuracy, loss_matrix, mean_loss, per_subnetwork
from partnets.subnetworks.parameters import partitioned_parameters
from partnets.subnetworks.state import state_of
from partnets.utils.modules import evaluating

PROPORTIONS = (0.5, 0.3, 0.2)
BATCH_SIZES = [1, 4, 7, 30, 31, 256]


class Rows(Dataset):
    """A map-style data set with Python numbers as labels."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], int(self.y[i])


class Negated(TensorDataset):
    """A subclass that transforms its examples, as users write it."""

    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return -x, y


class NegatedSubset(Subset):
    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return -x, y

    def __getitems__(self, indices):  # required by PyTorch
        return [self[i] for i in indices]


DATA = {
    "tensors": lambda x, y: (x, y),
    "list": lambda x, y: [x, y],
    "TensorDataset": TensorDataset,
    "Dataset": Rows,
    "Subset": lambda x, y: Subset(TensorDataset(x.flip(0), y.flip(0)), list(range(len(y)))[::-1]),
    "Subset of a Dataset": lambda x, y: Subset(Rows(x.flip(0), y.flip(0)), range(len(y) - 1, -1, -1)),
    "a subclass that transforms": lambda x, y: Negated(-x, y),
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


def test_accuracy_is_nan_where_a_logit_is_unless_its_label_is_ignored():
    logits, y = torch.eye(4), torch.arange(4)
    logits[2, 0] = torch.nan
    assert math.isnan(accuracy(nn.Identity(), (logits, y)))
    assert accuracy(nn.Identity(), (logits, y.where(y != 2, -100))) == 1.0


def test_any_mean_over_a_batch_is_averaged():
    x = torch.arange(5.0)[:, None]
    assert mean_loss(nn.Identity(), (x, x), lambda output, y: (output + y).mean(), batch_size=2) == 4.0


@pytest.mark.parametrize("sample", ["sample", "sample_upto"])
def test_chunks_sample_what_a_subclass_transforms(sample):
    x = torch.arange(1.0, 21.0)[:, None]
    chunks = partnets.chunk(Negated(x, torch.arange(20)), (0.5, 0.5))
    batch, y = getattr(chunks, sample)(2, 30)
    assert torch.equal(batch[:, 0], -1.0 - y)


@pytest.mark.parametrize("evaluate", [mean_loss, accuracy])
@pytest.mark.parametrize("fails", [False, True])
def test_modes_gradients_and_statistics_are_left_alone_also_by_an_exception(evaluate, fails):
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


def test_evaluating_is_evaluation_mode_inside():
    model = network().train()
    with evaluating(model):
        assert not any(module.training for module in model.modules())
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("evaluate", [mean_loss, accuracy])
@pytest.mark.parametrize("kind", ["tensors", "TensorDataset", "Dataset"])
def test_no_example_raises(evaluate, kind):
    with pytest.raises(ValueError, match="no example; pass at least one"):
        evaluate(network(), DATA[kind](*examples(0)))


@pytest.mark.parametrize(
    ("data", "arguments", "error", "message"),
    [
        ((torch.zeros(3, 3), torch.zeros(4)), {}, ValueError, "equal length"),
        (torch.zeros(3, 3), {}, TypeError, "pass a Dataset"),
        (examples(), {"batch_size": 0}, ValueError, "batch_size=0"),
    ],
)
def test_what_cannot_be_evaluated_raises(data, arguments, error, message):
    for evaluate in (mean_loss, accuracy):
        with pytest.raises(error, match=message):
            evaluate(network(), data, **arguments)


def test_a_metric_of_each_subnetwork_is_that_of_the_merged_ones_in_turn():
    model, data = partitioned(), examples()
    expected = [by_numpy(partnets.merge(model, k), *data)[1] for k in (1, 2, 3)]
    assert len(set(expected)) > 1
    model.train()
    assert per_subnetwork(model, lambda model: accuracy(model, data)) == pytest.approx(expected)
    assert state_of(model[0]).active == state_of(model[0]).update == 3


def test_afterwards_the_subnetwork_is_the_one_before_also_by_an_exception():
    model = partitioned()

    def metric(model):
        raise RuntimeError("no metric")

    with partnets.subnetwork(model, active=2, update=1):
        with pytest.raises(RuntimeError, match="no metric"):
            per_subnetwork(model, metric)
        assert (state_of(model[0]).active, state_of(model[0]).update) == (2, 1)


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


SUMS = {
    "function": lambda logits, y: F.cross_entropy(logits, y, reduction="sum"),
    "partial": functools.partial(F.cross_entropy, reduction="sum"),
    "module": nn.CrossEntropyLoss(reduction="sum"),
}


@pytest.mark.parametrize("loss", SUMS.values(), ids=SUMS)
def test_sums_over_a_batch_are_refused(loss):
    data, model = examples(), partitioned()
    chunks = partnets.chunk(data, PROPORTIONS)
    for judge in (lml, loss_matrix):
        with pytest.raises(ValueError, match="sum"):
            judge(model, chunks, loss, batch_size=4)
    with pytest.raises(ValueError, match="sum"):
        mean_loss(model, data, loss)


def test_a_loss_that_draws_is_tried_without_a_trace():
    data, model, drawn = examples(), partitioned(), []

    def loss(logits, y):
        drawn.append(torch.rand(()).item())
        return F.cross_entropy(logits, y)

    torch.manual_seed(0)
    mean_loss(model, data, loss, batch_size=4)
    torch.manual_seed(0)
    own = [torch.rand(()).item() for _ in drawn[1:]]
    assert [drawn[0], *drawn[2:]] == own  # the second call tests a batch with every example twice


def test_lml_sums_what_stands_right_of_the_diagonal():
    model, chunks = partitioned(), partnets.chunk(examples(), PROPORTIONS)
    matrix = loss_matrix(model, chunks)
    expected = -sum(chunks.sizes[k - 1] * matrix[k - 2, k - 1] for k in (2, 3))
    assert partnets.lml(model, chunks) == pytest.approx(expected.item(), rel=1e-12)


def test_the_loss_matrix_needs_as_many_chunks_as_partitions():
    with pytest.raises(ValueError, match="3 partitions and the data 2 chunks"):
        loss_matrix(partitioned(), partnets.chunk(examples(), (0.5, 0.5)))


@pytest.mark.parametrize("data", [(torch.ones(6, 4), torch.ones(6)), torch.utils.data.TensorDataset(torch.ones(6, 4))])
def test_data_that_are_no_chunks_are_refused_by_whatever_takes_chunks(data):
    model = partnets.partition(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), (0.5, 0.5))
    takers = [
        lambda: partnets.Trainer(model, data),
        lambda: partnets.lml(model, data),
        lambda: partnets.loss_matrix(model, data),
        lambda: partnets.estimate_statistics(model, data),
        lambda: partnets.Loader(data, 2, steps=2),
    ]
    for take in takers:
        with pytest.raises(TypeError, match=rf"the data are a {type(data).__name__}; split them first, with partnets"):
            take()
