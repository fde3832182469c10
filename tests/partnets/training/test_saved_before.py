"""Files that were saved before the packages had rooms load, and compute and train on to the same numbers."""

import importlib.util
import pickle
import sys

import pytest
import saved_network
import torch
import torch.distributed as dist
from saved_network import FOLDER

import partkernels
import partnets
from partnets import distributed

# The saved trainer learns a dropout rate directly.
pytestmark = pytest.mark.filterwarnings("ignore:4 .ConcreteDropout. learns directly:UserWarning")


@pytest.fixture(scope="module")
def expected():
    return torch.load(FOLDER / "expected.pt", weights_only=True)


def outputs(model):
    found = []
    for k in (1, 2, 3):
        with partnets.subnetwork(model, active=k), torch.no_grad():
            found.append(model.eval()(saved_network.inputs()))
    return found


@pytest.mark.full
def test_a_trainer_goes_on(expected):
    trainer = saved_network.trainer()
    trainer.load(FOLDER / "trainer.pt")
    evaluated = len(trainer.history.lml["lml"])
    trainer.fit(5)
    torch.testing.assert_close(trainer.history.steps["loss"], expected["after"]["loss"], rtol=1e-3, atol=1e-3)
    # Since then BatchNorm's statistics are estimated for L_ML, and steps of psi normalise by their batch.
    found, then = trainer.history.lml["lml"], expected["after"]["lml"]["lml"]
    assert len(found) == len(then) and found[:evaluated] == then[:evaluated]
    assert trainer.values() == pytest.approx(expected["after"]["values"], rel=1e-2)


def test_a_pickled_model_computes_the_same(expected):
    model = torch.load(FOLDER / "model.pt", weights_only=False)
    torch.testing.assert_close(outputs(model), expected["outputs"])


def test_a_state_dict_loads(expected):
    model = saved_network.partitioned()
    model.load_state_dict(torch.load(FOLDER / "state_dict.pt", weights_only=True))
    torch.testing.assert_close(outputs(model), expected["outputs"])


def test_a_partition_loads_without_running_code():
    partition = torch.load(FOLDER / "partition.pt", weights_only=True)
    again = partkernels.Partition.random(
        (4, 6), saved_network.PROPORTIONS, seed=0, defaults=partkernels.Uniform(0.1, seed=1)
    )
    assert torch.equal(partition.map, again.map) and partition.defaults == again.defaults


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("sgd", lambda model: partnets.optim.SGD(model, lr=0.1, momentum=0.9)),
        ("rmsprop", lambda model: partnets.optim.PerPartition(torch.optim.RMSprop, model, lr=0.1)),
    ],
)
def test_an_optimizer_loads(name, make):
    saved = torch.load(FOLDER / f"{name}.pt", weights_only=True)
    layer = partnets.Linear(6, 4, proportions=saved_network.PROPORTIONS, seed=1)
    layer.load_state_dict(saved["layer"])
    optimizer = make(layer)
    optimizer.load_state_dict(saved["optimizer"])
    torch.testing.assert_close(optimizer.state_dict()["state"], saved["optimizer"]["state"])


def test_a_distributed_checkpoint_loads(expected):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        trainer = saved_network.trainer()
        distributed.load(trainer, FOLDER / "distributed")
    finally:
        dist.destroy_process_group()
    assert vars(trainer.history) == expected["history"]


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_lightning_resumes(expected):
    module, loader = saved_network.lightning_module()
    saved_network.lightning_trainer(max_epochs=2).fit(module, loader, ckpt_path=FOLDER / "lightning.ckpt")
    found = {name: value for name, value in module.state_dict().items() if torch.is_tensor(value)}
    # Since then BatchNorm's statistics are estimated at the end.
    found, then = ({n: v for n, v in each.items() if "model.8." not in n} for each in (found, expected["resumed"]))
    torch.testing.assert_close(found, then, rtol=1e-2, atol=1e-2)


def test_chunks_that_were_pickled_without_a_collate_function_have_one():
    chunks = saved_network.chunks()
    del chunks.__dict__["collate"]
    x, _ = pickle.loads(pickle.dumps(chunks)).sample(1, 4)
    assert x.shape == (4, 5)


@pytest.mark.parametrize("package", [partnets, partkernels])
def test_modules_are_found_by_their_old_names(package):
    for old in package._moved.MOVED:
        module = importlib.import_module(f"{package.__name__}.{old}")
        assert importlib.util.find_spec(module.__name__) is not None
        if "." not in old and not callable(getattr(package, old)):
            assert getattr(package, old) is module
        new = sys.modules.get(f"{package.__name__}.{package._moved.MOVED[old]}")
        names = [name for name in vars(new) if not name.startswith("__")] if new else []
        assert all(getattr(module, name) is getattr(new, name) for name in names)
