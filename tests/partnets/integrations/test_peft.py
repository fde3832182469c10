"""Adapters of peft: only they are partitioned; they are tuned in one run, merged into the base, and saved by peft."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import partnets
from partnets import hyper, optim

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

PROPORTIONS = (0.5, 0.25, 0.25)
pytestmark = pytest.mark.filterwarnings("ignore")


def gpt2():
    config = transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=2, vocab_size=50, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config), {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}


def bert():
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=50
    )
    return transformers.BertForMaskedLM(config), {"target_modules": ["query", "value"]}


def adapted(make=gpt2, kind=peft.LoraConfig, scale="lora_alpha"):
    torch.manual_seed(0)
    base, options = make()
    return peft.get_peft_model(base, kind(r=8, **options, **{scale: 16})), torch.randint(50, (6, 12))


def divided(model, ids, scheme):
    example = {"example": {"input_ids": ids}} if scheme == "nested" else {}
    return partnets.partition(model, PROPORTIONS, scheme=scheme, seed=0, **example)


def loss_of(model):
    return lambda ids: model(input_ids=ids, labels=ids).loss


class Linear4bit(nn.Linear):
    """A linear layer as in quantisation libraries: two weights per byte, in one column, and a scale for each row."""

    def __init__(self, layer):
        super().__init__(layer.in_features, layer.out_features)
        self.scale = nn.Buffer(layer.weight.detach().abs().amax(1, keepdim=True) / 7)
        codes = (layer.weight.detach() / self.scale).round().to(torch.uint8).add(8).view(-1, 2)
        self.weight, self.bias = nn.Parameter(codes[:, :1] * 16 + codes[:, 1:], requires_grad=False), layer.bias

    def forward(self, x):
        codes = torch.cat([self.weight // 16, self.weight % 16], 1).view(self.out_features, self.in_features)
        return F.linear(x, (codes.to(x.dtype) - 8) * self.scale, self.bias)


def quantised(model):
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, Linear4bit(child))
    return model


def quantised_bert():
    model, options = bert()
    return quantised(model), options


@pytest.mark.cases(usual=2)
@pytest.mark.parametrize("scheme", ["weight", "nested"])
@pytest.mark.parametrize("make", [gpt2, bert, quantised_bert])
def test_only_adapters_are_partitioned_and_they_start_at_the_base_model(make, scheme, tmp_path):
    model, ids = adapted(make)
    with torch.no_grad():
        expected = model.eval()(input_ids=ids).logits
    before = {name: value.clone() for name, value in model.state_dict().items()}
    divided(model, ids, scheme)
    assert all(".lora_" in name for name in partnets.partitions(model))
    for k in (1, 2, 3):  # all equal the base initially
        with partnets.subnetwork(model, k), torch.no_grad():
            torch.testing.assert_close(model(input_ids=ids).logits, expected)
    optimizer = optim.Adam(model, lr=1e-2)
    for step in range(6):
        partnets.step_weights(model, optimizer, step % 3 + 1, ids, loss_of(model.train()))
    if make is quantised_bert:
        assert not partnets.audit(model, ids, forward=lambda model, ids: (model(input_ids=ids).logits, None))
    found = model.state_dict()
    for name, value in before.items():
        assert torch.equal(found[name], value) == (".lora_" not in name), name
    retrained = partnets.finalize(model, "retrain").eval()
    with torch.no_grad():
        torch.testing.assert_close(retrained(input_ids=ids).logits, expected)
    lora_a = next(p for name, p in retrained.named_parameters() if "lora_A" in name)
    assert lora_a.requires_grad and lora_a.any()


@pytest.mark.full
@pytest.mark.parametrize("scheme", ["weight", "nested"])
def test_adapters_are_merged_into_the_base_and_saved_in_pefts_format(scheme, tmp_path):
    model, ids = adapted()
    divided(model, ids, scheme)
    optimizer = optim.Adam(model, lr=1e-2)
    for step in range(6):
        partnets.step_weights(model, optimizer, step % 3 + 1, ids, loss_of(model.train()))
    model.eval()
    torch.manual_seed(0)
    base, _ = gpt2()
    with torch.no_grad():
        for k in (1, 3):
            with partnets.subnetwork(model, k):
                expected = model(input_ids=ids).logits
            merged = partnets.merge(model, active=k)
            torch.testing.assert_close(merged(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-5)
        merged.save_pretrained(tmp_path)
        loaded = peft.PeftModel.from_pretrained(base, tmp_path).eval()
        torch.testing.assert_close(loaded(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-5)
        whole = merged.merge_and_unload()
        torch.testing.assert_close(whole(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-5)
    assert not isinstance(whole, peft.PeftModel)


def test_other_adapters_are_partitioned():
    model, ids = adapted(bert, peft.LoHaConfig, "alpha")
    divided(model, ids, "weight")
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    before = [parameter.detach().clone() for parameter in learning]
    partnets.step_weights(model, optim.Adam(model, lr=1e-2), 2, ids, loss_of(model))
    assert learning and not all(map(torch.equal, before, learning))


class Tuned(nn.Module):
    """A model with adapters and learned dropout, weight decay and source weights."""

    def __init__(self, model):
        super().__init__()
        self.model, self.dropout = model, hyper.ConcreteDropout(0.1)
        for module in model.modules():
            if isinstance(module, peft.tuners.lora.LoraLayer):
                module.lora_dropout["default"] = self.dropout
        adapters = [module for path, module in model.named_modules() if path.endswith(("lora_A", "lora_B"))]
        self.decay, self.sources = hyper.WeightDecay(adapters, 1e-3), hyper.SourceWeights(("text", "noise"))

    def forward(self, ids):
        logits = self.model(input_ids=ids).logits[:, :-1].transpose(1, 2)
        return self.sources(self.decay(logits))


@pytest.mark.cases(usual=0, full=1)
@pytest.mark.parametrize("scheme", ["weight", "nested"])
def test_dropout_decay_and_sources_are_tuned_in_one_run(scheme):
    model, _ = adapted()
    model = Tuned(model)
    ids, source = torch.randint(50, (40, 12)), torch.arange(40) % 2
    example = {"example": ids[:2]} if scheme == "nested" else {}
    partnets.partition(model, PROPORTIONS, scheme=scheme, **example)
    assert all(".lora_" in name for name in partnets.partitions(model))
    examples = [(ids[i], (ids[i, 1:], source[i])) for i in range(40)]
    psi = [model.dropout, model.decay, model.sources]
    rates = torch.optim.Adam([p for one in psi for p in one.parameters()], lr=0.1)
    trainer = partnets.Trainer(
        model, partnets.chunk(examples, PROPORTIONS), hyper=psi, loss=model.sources, hyper_optimizer=rates, batch_size=8
    )
    before = trainer.values()
    trainer.fit(6)
    after = trainer.values()
    assert [name.rpartition(".")[2] for name in after] == ["rate", "decay", "text", "noise"]
    assert all(after[name] != value for name, value in before.items())
    merged = partnets.merge(model)
    assert F.cross_entropy(merged.eval()(ids), ids[:, 1:]).isfinite()
