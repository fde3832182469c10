"""Hugging Face's trainer on two ranks trains as one process does."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from bert import PROPORTIONS, Parity, masked, trainer_of

import partnets
from partnets import hyper
from partnets.subnetworks.parameters import partitioned_parameters


def train(folder, model, options, resume=None):
    """Return the weights and ψ after training, and the number of steps."""
    trainer = trainer_of(folder, masked(**model), **options)
    if dist.is_initialized():
        torch.manual_seed(dist.get_rank())
    trainer.train(resume_from_checkpoint=resume)
    tensors = [tensor.detach() for tensor in trainer.model.state_dict().values() if tensor.is_floating_point()]
    return trainer.state.global_step, tensors


@pytest.mark.parametrize(
    ("model", "options"),
    [
        pytest.param({}, {"parts": 2}, id="accumulated"),
        pytest.param({}, {}, id="direct", marks=pytest.mark.full),
        pytest.param({"decays": True}, {}, id="lookahead", marks=pytest.mark.full),
    ],
)
def test_two_ranks_train_as_one_process_does(two_ranks, tmp_path, model, options):
    steps, expected = train(str(tmp_path / "one"), model, {})
    for done, found in two_ranks(train, str(tmp_path / "two"), model, options):
        assert done == steps == 10
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def bytes_sent(folder):
    """Return the bytes of gradients that a rank has sent, and those of the entries that learned."""
    trainer, learned = trainer_of(folder, masked()), []
    owned = partitioned_parameters(trainer.model)
    psi = sum(one.numel() for one in hyper.hyperparameters(trainer.model))

    def note(optimizer, *_):
        learned.append(psi + sum(one.numel(optimizer.update) for one in owned))

    trainer.create_optimizer().register_step_pre_hook(note)
    trainer.train()
    return trainer.model_wrapped.packing.bytes, 4 * sum(learned)


@pytest.mark.full
def test_ranks_send_only_the_gradients_of_the_partition_that_learns(two_ranks, tmp_path):
    assert all(sent == learned for sent, learned in two_ranks(bytes_sent, str(tmp_path)))


@pytest.mark.full
def test_two_ranks_resume_to_the_same_bits(two_ranks, tmp_path):
    model, options = {"noise": 0.3}, {"save_steps": 3}
    whole = two_ranks(train, str(tmp_path), model, options)
    resumed = two_ranks(train, str(tmp_path / "resumed"), model, options, str(tmp_path / "checkpoint-3"))
    for (_, one), (_, other) in zip(whole, resumed, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.full
def test_later_chunks_do_not_reach_earlier_partitions_on_two_ranks(two_ranks, tmp_path):
    last = partnets.chunk(Parity(), PROPORTIONS).indices(3).tolist()
    first, second = (two_ranks(weights_of_partition_1, str(tmp_path), changed)[0] for changed in ((), last))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def weights_of_partition_1(folder, changed):
    """Train with fixed ψ and without clipping by the norm of w_k."""
    fixed = partial(torch.optim.SGD, lr=0.0)
    trainer = trainer_of(folder, masked(), data=Parity(changed), hyper_optimizer=fixed, max_grad_norm=0)
    trainer.train()
    found = partnets.partitions(trainer.model)
    named = trainer.model.named_parameters()
    return [weight.detach()[found[name].mask(1)] for name, weight in named if name in found]
