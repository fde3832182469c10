"""Public names exist, have types and hide no module that contains them, and importing them is fast."""

import importlib
import inspect
import pkgutil
import sys

import pytest
from processes import run_python

import partkernels
import partnets

# Import paths as given in the documentation.
PUBLIC = {
    "partkernels": """Channels Defaults InputError NestedPartition Normal Partition Stored Uniform Zeros __version__
        adam_step adam_steps backends conv1d conv2d conv_transpose1d conv_transpose2d embedding explain gather_entries
        linear scatter_entries sgd_step sgd_steps subnetwork_weight use_backend""",
    "partkernels.testing": "Yardstick poisoned_memory",
    "partkernels.backend.triton.operators": "Config tuning use_plan",
    "partkernels.backend.plan": "Config use_plan",
    "partkernels.partition": "Partition sizes",
    "partkernels.defaults": "Defaults Normal Stored Uniform Zeros check_seed",
    "partnets": """GRU LSTM RNN BatchNorm1d BatchNorm2d BatchNorm3d Bilinear Chunks Conv1d Conv2d Conv3d
        ConvTranspose1d ConvTranspose2d ConvTranspose3d Embedding EmbeddingBag Ensemble GroupNorm History Implicit
        LayerNorm Linear Loader Lookahead MultiheadAttention RMSNorm Rule Trainer Tuned __version__ accuracy audit
        callbacks chunk data estimate_statistics explain_partition federated finalize held_out hyper hyper_learning lml
        loggers loss_matrix mean_loss merge nn optim partition partitions per_subnetwork register single_chunk
        step_hyper step_lookahead step_weights stn subnetwork tune weights_learning without_rule""",
    "partnets.data": "Data Normalise Parts ToFloat digits moments",
    "partnets.hyper": """ActivationPenalty Affine Averaged ColourJitter ConcreteDropout Cutout DropConnect Dropout
        EmbeddingDropout Hyperparameter InTraining InputMask InputNoise LabelSmoothing Learned LearningRate Mixup
        ObservationNoise Penalty Range SourceWeights Submodule Temperature TrainingLoss WeightDecay assign
        expected_error gaussian_nll hyperparameters interval logarithmic penalties positive probability real""",
    "partnets.distributed": "DDP OptimizerState Trainer fully_shard load save share",
    "partnets.training.callbacks": "Callback every",
    "partnets.integrations.lightning": "PartitionedModule",
    "partnets.training.loggers": "CSV Scalars TensorBoard",
    "partnets.optim": "SGD Adam AdamW PartitionedOptimizer PerPartition decays",
    "partnets.nn": """GRU LSTM RNN BatchNorm1d BatchNorm2d BatchNorm3d Bias Bilinear Conv1d Conv2d Conv3d
        ConvTranspose1d ConvTranspose2d ConvTranspose3d Embedding EmbeddingBag GroupNorm LayerNorm Linear
        MultiheadAttention RMSNorm Scale""",
    "partnets.subnetworks.parameters": "PartitionedParameter partitioned_parameters",
    "partnets.subnetworks.state": "PartitionState num_partitions partitioned_modules state_of",
    "partnets.training": """History Implicit Lookahead Settings Trainer callbacks held_out hyper_learning loggers
        single_chunk step_hyper step_lookahead step_weights weights_learning""",
    "partnets.stn": "HyperLayer HyperVector Trainer convert freeze step_hyper step_weights",
    "partnets.federated": "Client Privacy Round Server Update assign",
    "partnets.federated.flower": "LocalGrid PartitionedFedAvg client_app",
    "partnets.integrations.hugging_face": "PartitionedTrainer",
    "partkernels_numpy": """Defaults InputError Normal Partition Stored Uniform Zeros __version__ adam_step conv2d
        conv2d_grad_input conv2d_grad_weight instruction_set linear linear_grad_input linear_grad_weight set_threads
        sgd_step subnetwork_weight subnetwork_weight_grad threads""",
}


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names_are_importable(module):
    if module == "partnets.federated.flower":
        pytest.importorskip("flwr", reason="Flower needs Python 3.11")
    found = importlib.import_module(module)
    assert [name for name in PUBLIC[module].split() if not hasattr(found, name)] == []


@pytest.mark.parametrize("package", [partkernels, partnets])
def test_no_attribute_hides_a_submodule(package):
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        parent, _, leaf = found.name.rpartition(".")
        seen = getattr(importlib.import_module(parent), leaf, None)
        assert seen is None or getattr(seen, "__name__", "") == found.name, f"{parent}.{leaf} is {seen!r}"


def functions(package):
    """Yield the functions and public methods that a package and its folders name in `__all__`, with descriptions."""
    folders = [one.name for one in pkgutil.walk_packages(package.__path__, f"{package.__name__}.") if one.ispkg]
    for folder in [package.__name__, *folders]:
        for name in getattr(sys.modules.get(folder), "__all__", ()):
            one = getattr(sys.modules[folder], name)
            for member, value in vars(one).items() if isinstance(one, type) else [(name, one)]:
                function = inspect.unwrap(getattr(value, "__func__", getattr(value, "fget", value)))
                is_public = member == "__init__" or not member.startswith("_")
                if is_public and inspect.isfunction(function) and function.__name__ == member:
                    yield f"{folder}.{name}, {member}", function


@pytest.mark.parametrize("package", [partkernels, partnets])
def test_public_functions_have_types(package):
    for path, function in functions(package):
        signature = inspect.signature(function)
        lacking = {one.name for one in signature.parameters.values() if one.annotation is one.empty}
        assert lacking <= {"self", "cls"} and signature.return_annotation is not signature.empty, f"{path}: {lacking}"


def test_importing_and_partitioning_load_nothing_large_beside_torch():
    """Check that large modules are imported only when needed; torch's compiler takes 1.5 s and 160 MB."""
    large = {"torch._dynamo", "torch._inductor", "triton", "torchvision", "scipy", "pandas", "matplotlib", "lightning"}
    program = (
        "import sys, torch; before = {*sys.modules}; import partkernels, partnets;"
        " model = partnets.partition(torch.nn.Sequential(torch.nn.Linear(2, 2)), proportions=(0.5, 0.5));"
        " model(torch.ones(1, 2)).sum().backward(); print(*{*sys.modules} - before)"
    )
    process = run_python("-c", program, check=True)
    assert large.isdisjoint(process.stdout.split())
