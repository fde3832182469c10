"""Models: parameter counts against published numbers, values against torch layers, and properties of all models."""

import pytest
import small_network as partitions
import torch
import torch.nn.functional as F
from torch import nn

import partnets
from partbench import models

# A small model of each kind, and the shape of one example without its batch.
SMALL = {
    "MLP": (lambda: models.MLP(6, (8, 7), classes=10), (6,)),
    "MnistCNN": (lambda: models.MnistCNN(image_size=12), (1, 12, 12)),
    "FixupResNet": (lambda: models.FixupResNet(14), (3, 12, 12)),
    "WideResNet": (lambda: models.WideResNet(8, 2), (3, 12, 12)),
    "ThinResNet50": (models.ThinResNet50, (3, 8, 8)),
    "ResNet9": (lambda: models.ResNet9(dropout=0.0), (3, 32, 32)),
    "Block": (lambda: models.Block(12, 3), (5, 12)),
    "TransformerLM": (lambda: models.TransformerLM(10, 6, 12, 2, 3), (6,)),
    "ViT": (lambda: models.ViT(16, 4, 12, 2, 3), (3, 16, 16)),
}
every_model = pytest.mark.parametrize("name", SMALL)


def small(name, batch=2):
    make, shape = SMALL[name]
    return make(), torch.randint(10, (batch, *shape)) if name == "TransformerLM" else torch.rand(batch, *shape)


def perturbed(model):
    """Perturb a model's initial parameters, because FixUp's zeros would hide most of its computation."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def parameters(make, *args, **kwargs):
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in make(*args, **kwargs).parameters())


def of_type(model, *types):
    return [module for module in model.modules() if isinstance(module, types)]


@every_model
@pytest.mark.parametrize("batch", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_shapes_and_dtypes(name, batch, dtype):
    model, x = small(name, batch)
    output = model.eval().to(dtype)(x.to(dtype) if x.is_floating_point() else x)
    assert output.shape == {"TransformerLM": (batch, 6, 10), "Block": (batch, 5, 12)}.get(name, (batch, 10))
    assert output.dtype == dtype


@every_model
def test_gradients_reach_every_parameter(name):
    model, x = small(name)
    perturbed(model)(x).square().sum().backward()
    for path, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all() and parameter.grad.any(), path


# Without ThinResNet50, a WideResNet that takes 3 s to trace.
@pytest.mark.cases(usual=4)
@pytest.mark.parametrize("name", [name for name in SMALL if name != "ThinResNet50"])
def test_compiles_as_one_graph(name):
    torch.compiler.reset()  # graphs of other tests would count towards the recompilation limit
    model, x = small(name)
    perturbed(model).eval()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x))


def test_inputs_of_another_size_raise_with_the_cure():
    vit, _ = small("ViT")
    with pytest.raises(ValueError, match=r"shape \(2, 3, 4, 4\); pass \[batch, channels, 16, 16\]"):
        vit(torch.rand(2, 3, 4, 4))  # one patch would be broadcast to all positions
    lm, _ = small("TransformerLM")
    with pytest.raises(ValueError, match="7 tokens, more than context=6; pass shorter"):
        lm(torch.zeros(1, 7, dtype=torch.int64))


MNIST_LAYERS = [(1 * 25, 20), (20 * 25, 50), (50 * 7 * 7, 500), (500, 50), (50, 10)]
WIDTH, DEPTH = 2048, 16
# A model and its number of parameters, from its layers or a published number.
SIZES = {
    "Table 9": (models.MnistCNN, sum(fan_in * fan_out + fan_out for fan_in, fan_out in MNIST_LAYERS)),
    "WRN-28-10 without projections": (
        lambda: models.WideResNet(26, 10), 36_479_194 - 16 * 160 - 160 * 320 - 320 * 640,
    ),
    "GPT-2, whose head is its embedding": (
        lambda: models.TransformerLM(width=768, depth=12, heads=12), 124_439_808 + 768 * 50257,
    ),
    "DeiT-tiny without the class token": (lambda: models.ViT(224, 16, classes=1000), 5_717_416 - 2 * 192),
    "a billion": (
        models.TransformerLM,
        DEPTH * (12 * WIDTH**2 + 13 * WIDTH) + (2 * 50257 + 1024) * WIDTH + 2 * WIDTH,
    ),
}  # fmt: skip
for depth, n in ((8, 1), (14, 2), (20, 3), (56, 9)):
    STAGES = [9 * (before * width + (2 * n - 1) * width**2) for before, width in [(16, 16), (16, 32), (32, 64)]]
    # The convolutions of a ResNet, and five scalars a block.
    SIZES[f"FixupResNet {depth}"] = (
        lambda depth=depth: models.FixupResNet(depth), 9 * 3 * 16 + sum(STAGES) + 64 * 10 + 10 + 5 * 3 * n + 2
    )  # fmt: skip


@pytest.mark.parametrize("name", SIZES)
def test_models_have_as_many_parameters_as_published(name):
    make, expected = SIZES[name]
    assert parameters(make) == expected


@pytest.mark.parametrize("defaults", ["seed", "stored", "zero"])
def test_partitioning_keeps_the_initialization_of_fixup(defaults):
    model = partnets.partition(models.FixupResNet(14, width=2), (0.8, 0.1, 0.1), defaults=defaults)
    for active in (1, 2, 3):
        with partnets.subnetwork(model, active):
            assert torch.equal(model(torch.randn(2, 3, 8, 8)), torch.zeros(2, 10))
    for stage, channels in ((model.stage1, 32), (model.stage2, 64), (model.stage3, 128)):
        for block in stage:
            deviation = (2 / (9 * channels)) ** 0.5 * 6**-0.5
            assert block.conv1.weight.std().item() == pytest.approx(deviation, rel=0.04)
            assert not block.conv2.weight.any()
    assert all(module.bias.tolist() == [0] for module in of_type(model, partnets.nn.Bias))
    assert all(module.scale.tolist() == [1] for module in of_type(model, partnets.nn.Scale))
    assert not model.classifier.weight.any() and not model.classifier.bias.any()
    half_width = model.stem.weight.abs().max().item()
    assert half_width == pytest.approx((9 * 3) ** -0.5, rel=0.02)  # torch's default


# Models in which every parameter has a partitioning rule.
WHOLE = {
    "MLP": lambda: (models.MLP(6), (6,)),
    "MnistCNN": lambda: (models.MnistCNN(image_size=8), (1, 8, 8)),
    "FixupResNet": lambda: (models.FixupResNet(8), (3, 8, 8)),
    "WideResNet": lambda: (models.WideResNet(8, 1, norm=lambda channels: nn.GroupNorm(2, channels)), (3, 16, 16)),
    "ThinResNet50": lambda: (models.ThinResNet50(), (3, 8, 8)),
    "ResNet9": lambda: (models.ResNet9(dropout=0.0), (3, 32, 32)),
    "Block": lambda: (models.Block(12, 3), (5, 12)),
}


@pytest.mark.cases(usual=5)
@pytest.mark.parametrize("defaults", ["seed", "zero"])
@pytest.mark.parametrize("name", WHOLE)
def test_models_of_the_benchmarks_are_partitioned_without_skip(name, defaults):
    model, shape = WHOLE[name]()
    partnets.partition(model, (0.8, 0.1, 0.1), defaults=defaults)
    assert {*partnets.optim.SGD(model).parameters()} == {*model.parameters()}
    x = torch.rand(2, *shape)
    partitions.perturbed(model, 0.01)
    with partnets.subnetwork(model, active=2, update=1):
        output = model(x)
        output.square().sum().backward()
    torch.testing.assert_close(partnets.merge(model, 2)(x), output, rtol=1e-3, atol=1e-4)
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_mlp_has_the_layers_of_the_paper():
    layers = [*models.MLP(30)]
    widths = [(layer.in_features, layer.out_features) for layer in layers[::2]]
    assert widths == [(30, 256), (256, 256), (256, 2)] and [type(layer) for layer in layers[1::2]] == [nn.GELU] * 2
    assert parameters(models.MLP, 30) == 30 * 256 + 256 * 256 + 256 * 2 + 256 + 256 + 2


@pytest.mark.parametrize("partition", [False, True], ids=["dense", "partitioned from a seed"])
def test_mlp_starts_by_kaimings_scheme(partition):
    model = models.MLP(300, hidden=(400, 200), classes=30)
    if partition:
        partnets.partition(model, (0.8, 0.2))
    for layer, fan_in in zip([*model][::2], (300, 400, 200), strict=True):
        assert layer.weight.abs().max().item() == pytest.approx((6 / fan_in) ** 0.5, rel=0.01)
        assert layer.weight.std().item() == pytest.approx((2 / fan_in) ** 0.5, rel=0.03)
        assert not layer.bias.any()


def test_fixup_blocks_are_those_of_the_paper():
    model = perturbed(models.FixupResNet(14))
    x = torch.randn(2, 16, 9, 9)
    for block, stride in ((model.stage1[0], 1), (model.stage2[0], 2)):
        a1, b1, a2, b2 = (module.bias for module in (block.bias1a, block.bias1b, block.bias2a, block.bias2b))
        inner = F.relu(F.conv2d(x + a1, block.conv1.weight, stride=stride, padding=1) + b1)
        branch = block.scale.scale * F.conv2d(inner + a2, block.conv2.weight, padding=1) + b2
        identity = x
        if stride == 2:
            pooled = F.avg_pool2d(x + a1, 1, stride=2)
            identity = torch.cat([pooled, torch.zeros_like(pooled)], 1)
        torch.testing.assert_close(block(x), F.relu(branch + identity))


def test_thin_resnet_50_has_50_layers_in_three_stages_of_8_blocks_and_groups_of_2():
    model = models.ThinResNet50()
    assert len(of_type(model, nn.Conv2d, nn.Linear)) == 50
    assert [len(stage) for stage in (model.stage1, model.stage2, model.stage3)] == [8, 8, 8]
    assert len(of_type(model, nn.GroupNorm)) == 2 * 24 + 1 and not of_type(model, nn.BatchNorm2d)
    assert all(norm.num_groups == 2 for norm in of_type(model, nn.GroupNorm))
    assert [stage[-1].conv2.out_channels for stage in (model.stage1, model.stage2, model.stage3)] == [16, 32, 64]


def test_resnet_9_has_the_parameters_of_its_layers():
    channels = [(3, 64), (64, 128), (128, 128), (128, 128), (128, 256), (256, 512), (512, 512), (512, 512)]
    convolutions = sum(9 * before * after + after for before, after in channels)
    norms = sum(2 * after for _, after in channels)
    assert parameters(models.ResNet9) == convolutions + norms + 512 * 10 + 10
    model = models.ResNet9(groups=2, dropout=0.5)
    assert {norm.num_groups for norm in of_type(model, nn.GroupNorm)} == {2}
    assert [dropout.p for dropout in of_type(model, nn.Dropout)] == [0.5]


def test_a_block_is_torchs_encoder_layer():
    block = perturbed(models.Block(12, 3))
    theirs = nn.TransformerEncoderLayer(12, 3, 48, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
    ours = block.state_dict()
    names = {
        "qkv.weight": "self_attn.in_proj_weight",
        "qkv.bias": "self_attn.in_proj_bias",
        "out.weight": "self_attn.out_proj.weight",
        "out.bias": "self_attn.out_proj.bias",
        "expand.weight": "linear1.weight",
        "expand.bias": "linear1.bias",
        "contract.weight": "linear2.weight",
        "contract.bias": "linear2.bias",
    }
    theirs.load_state_dict({names.get(name, name): value for name, value in ours.items()})
    x = torch.randn(2, 5, 12)
    torch.testing.assert_close(block(x), theirs(x))
    block.causal = True
    torch.testing.assert_close(block(x), theirs(x, nn.Transformer.generate_square_subsequent_mask(5)))


def test_later_tokens_reach_no_earlier_output_of_the_language_model():
    model, tokens = small("TransformerLM")
    changed = tokens.clone()
    changed[:, 3] = (changed[:, 3] + 1) % 10
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(after[:, :3], before[:, :3], rtol=0, atol=1e-6)
    assert (after[:, 3:] != before[:, 3:]).any(-1).all()
