"""Adapters on text and noise in equal parts: dropout and the weights of the sources, learned in one fine-tuning."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

import partnets
from partbench import needing
from partbench.measuring.peak import of_tensors
from partbench.paper.experiment import Claim, Experiment, Record, Table, lower, registered, select, text
from partbench.paper.recipes import cosine, limited
from partbench.paper.runs import fit
from partbench.paper.stn_lstm import documentation, encoded, windows, words_of
from partnets import hyper, optim

LENGTH, BATCH, STEPS, BASE_STEPS, QUICK_STEPS = 32, 32, 400, 1500, 30
LR, BASE_LR, HYPER_LR = 3e-3, 2e-3, 0.05
PROPORTIONS = (0.8, 0.1, 0.1)
# The share of the second half of the text from which adapters learn; the rest is the test.
LEARNED = 0.6
# For a masked language model: the share of masked words, and the id of the mask.
MASKED, MASK = 0.15, 1
TEXT, NOISE = 0, 1
# Weights of sources are learned by finite differences, in the memory of a training step.
AHEAD = partnets.Lookahead(exact=False)
NETWORKS = {"gpt2": "GPT-2", "bert": "BERT"}
ROWS = {
    "base": "the base, without adapters",
    "all": "LoRA, text and noise",
    "text": "LoRA, text alone",
    "tuned": "partitioned LoRA, text and noise, dropout and weights learned",
    "finetuned": "then as many steps more, whole, at what was found",
}
# The most memory of a step, over that of plain LoRA.
MOST = 1.02


@registered
class Adapters(Experiment):
    """Small GPT-2 and BERT, trained on half of Python's documentation and adapted to the other half."""

    name = "adapters"
    paper = "Hu et al. 2022"
    datasets = ("documentation",)

    def settings(self, dataset: str, seeds: Sequence[int], quick: bool) -> list[Record]:
        common = limited({"dataset": dataset, "steps": STEPS}, quick, QUICK_STEPS)
        return [{**common, "network": name, "seed": seed} for seed, name in product(seeds, NETWORKS)]

    def train(self, setting: Record, checkpoint: Path) -> Record:
        """Train all rows of one network, which share a base."""
        tuning = Tuning(setting["network"], setting["seed"], setting["steps"], checkpoint)
        found = {"base": tuning.test_loss(tuning.adapted())}
        for name in ("all", "text"):
            found[name] = tuning.test_loss(tuning.plain(tuning.adapted(), name, name))
        model = tuning.adapted()
        found["psi"] = tuning.tuned(model).values()
        found["psi"] = {name.rpartition(".")[2]: value for name, value in found["psi"].items()}
        found["tuned"] = tuning.test_loss(model)
        merged = partnets.finalize(model, "finetune")
        found["finetuned"] = tuning.test_loss(tuning.plain(merged, "all", "finetuned"))
        return {**found, **tuning.memory()}

    def table(self, found: pd.DataFrame) -> Table:
        def psi(mine: pd.DataFrame, name: str) -> str:
            return text(mine.psi.map(lambda one: one[name]), 2)

        rows = []
        for (name, network), row in product(NETWORKS.items(), ROWS):
            mine, learned = select(found, network=name), row == "tuned"
            rows.append([network, ROWS[row], text(mine[row], 3)])
            rows[-1] += [psi(mine, one) for one in ("rate", "text", "noise")] if learned else [""] * 3
            rows[-1] += [text(mine[one], 3) for one in ("of_w", "of_psi")] if learned else [""] * 2
        head = ["", "", "test loss, nats", "dropout", "weight of text", "of noise", "memory, step of w", "of ψ"]
        return head, rows

    def draw(self, found: pd.DataFrame) -> Figure:
        figure = Figure(figsize=(10, 3), layout="constrained")
        for axes, (name, network) in zip(figure.subplots(1, len(NETWORKS)), NETWORKS.items(), strict=True):
            mine = select(found, network=name)
            for i, row in enumerate(ROWS):
                axes.plot(mine[row], [i] * len(mine), "o")
            axes.set(title=network, xlabel="test loss [nats]", yticks=range(len(ROWS)))
            axes.set_yticklabels(ROWS.values() if name == next(iter(NETWORKS)) else [], fontsize="small")
            axes.invert_yaxis()
        return figure

    def claims(self, found: pd.DataFrame) -> list[Claim]:
        return [claim for name, network in NETWORKS.items() for claim in _claims(select(found, network=name), network)]


def _claims(mine: pd.DataFrame, network: str) -> Iterator[Claim]:
    yield lower(f"{network}: tuned, below LoRA on text and noise", mine.tuned, mine["all"])
    gained, possible = mine["all"] - mine.finetuned, mine["all"] - mine["text"]
    part = (gained.mean() / possible.mean()).item()
    yield Claim(f"{network}: finetuned, at least 0.9 of what leaving the noise out gains", f"{part:.2f}", part >= 0.9)
    for column, label in (("of_w", "w"), ("of_psi", "ψ")):
        most = mine[column].max().item()
        yield Claim(f"{network}: a step of {label} takes at most {MOST} of LoRA's memory", f"{most:.3f}", most <= MOST)


class Adapted(nn.Module):
    """A model with LoRA; its dropout and its source weights are ψ. Logits are [batch, words, length]."""

    def __init__(self, base: nn.Module, name: str) -> None:
        super().__init__()
        with needing("paper"):
            import peft
        targets = {"gpt2": ["c_attn", "c_proj", "c_fc"], "bert": ["query", "value", "dense"]}[name]
        config = peft.LoraConfig(r=8, lora_alpha=16, target_modules=targets, fan_in_fan_out=name == "gpt2")
        self.dropout, self.model = hyper.ConcreteDropout(0.1), peft.get_peft_model(base, config)
        for module in self.model.modules():
            if isinstance(module, peft.tuners.lora.LoraLayer):
                module.lora_dropout["default"] = self.dropout
        self.sources = hyper.SourceWeights(("text", "noise"))

    def forward(self, ids: Tensor) -> Tensor:
        return self.sources(self.model(input_ids=ids).logits.transpose(1, 2))


def of_text(output: Tensor, y: Sequence[Tensor]) -> Tensor:
    """Return the loss of the text examples, which judges ψ."""
    targets, sources = y
    losses, counts = F.cross_entropy(output, targets, reduction="none"), targets != -100
    counts = counts & (sources == TEXT)[:, None]
    return (losses * counts).sum() / counts.sum().clamp(min=1)


def of_both(output: Tensor, y: Sequence[Tensor]) -> Tensor:
    """Return the mean loss of text and noise examples."""
    return F.cross_entropy(output, y[0])


class Tuning:
    """One base model with one seed, and the training of adapters for it."""

    def __init__(self, name: str, seed: int, steps: int, checkpoint: Path) -> None:
        self.name, self.seed, self.steps, self.checkpoint = name, seed, steps, checkpoint
        self.generator = torch.Generator().manual_seed(seed)
        paragraphs = documentation()
        others = paragraphs[len(paragraphs) // 2 :]
        order = torch.randperm(len(others), generator=self.generator).tolist()
        learned = round(LEARNED * len(others))
        parts = (
            paragraphs[: len(paragraphs) // 2],
            [others[i] for i in order[:learned]],
            [others[i] for i in order[learned:]],
        )
        base, tuning, test = ([word for part in texts for word in words_of(part)] for texts in parts)
        (_, base, tuning, test), words = encoded([base + tuning, base, tuning, test])
        self.words = words + 1  # ids from MASK on move up by one
        noise = tuning[torch.randperm(len(tuning), generator=self.generator)]
        self.base_examples, self.test = self._examples(base), self._examples(test)
        self.examples = {TEXT: self._examples(tuning), NOISE: self._examples(noise)}
        self.base = self._trained(self._network(), BASE_STEPS if steps == STEPS else steps)

    def _examples(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, [examples, LENGTH]; targets are the next words, or the masked ones."""
        inputs, targets = windows(tokens + (tokens >= MASK), LENGTH).tensors
        if self.name == "gpt2":
            return inputs, targets
        masked = torch.rand(inputs.shape, generator=self.generator) < MASKED
        return inputs.masked_fill(masked, MASK), inputs.masked_fill(~masked, -100)

    def _network(self) -> nn.Module:
        with needing("paper"):
            import transformers
        torch.manual_seed(self.seed)
        if self.name == "gpt2":
            sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": LENGTH}
            config = transformers.GPT2Config(vocab_size=self.words, bos_token_id=0, eos_token_id=0, **sizes)
            return transformers.GPT2LMHeadModel(config)
        sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
        config = transformers.BertConfig(vocab_size=self.words, max_position_embeddings=LENGTH, **sizes)
        return transformers.BertForMaskedLM(config)

    def _trained(self, network: nn.Module, steps: int) -> nn.Module:
        optimizer = torch.optim.AdamW(network.parameters(), lr=BASE_LR)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        ids, targets = self.base_examples
        for _ in range(steps):
            batch = torch.randint(len(ids), (BATCH,), generator=self.generator)
            optimizer.zero_grad()
            F.cross_entropy(network(input_ids=ids[batch]).logits.transpose(1, 2), targets[batch]).backward()
            optimizer.step()
            scheduler.step()
        return network

    def adapted(self) -> Adapted:
        torch.manual_seed(self.seed)
        base = self._network()
        base.load_state_dict(self.base.state_dict())
        return Adapted(base, self.name)

    def data(self, sources: str) -> list[tuple[Tensor, tuple[Tensor, int]]]:
        """Return training examples (x, (y, source)): of 'text' only, or of text and noise with 'all'."""
        kinds = (TEXT,) if sources == "text" else (TEXT, NOISE)
        return [(x, (y, kind)) for kind in kinds for x, y in zip(*self.examples[kind], strict=True)]

    def plain(self, model: nn.Module, sources: str, part: str) -> nn.Module:
        """Train the model unpartitioned with ψ fixed; sources count alike unless their weights were learned."""
        if part != "finetuned":
            model.sources = nn.Identity()
        whole = partnets.single_chunk(model, self.data(sources), seed=self.seed)
        self._fit(*whole, part, loss=model.sources if part == "finetuned" else of_both)
        return model

    def tuned(self, model: Adapted) -> partnets.Trainer:
        """Partition and train the model, learning dropout directly and the weights of sources by lookahead."""
        partnets.partition(model, PROPORTIONS, scheme="nested", example=self.test[0][:2])
        psi = [model.dropout, model.sources]
        optimizer = torch.optim.Adam([parameter for one in psi for parameter in one.parameters()], lr=HYPER_LR)
        chunks = partnets.chunk(self.data("all"), PROPORTIONS, seed=self.seed)
        options = {"hyper": psi, "hyper_optimizer": optimizer, "hyper_gradient": {model.sources: AHEAD}}
        return self._fit(model, chunks, "tuned", loss=model.sources, hyper_loss=of_text, **options)

    def _fit(self, model: nn.Module, chunks: partnets.Chunks, part: str, **options: Any) -> partnets.Trainer:
        torch.manual_seed(self.seed)
        optimizer = optim.Adam(model, lr=LR)
        options = {"batch_size": BATCH, "seed": self.seed, "scheduler": cosine(optimizer, self.steps), **options}
        trainer = partnets.Trainer(model, chunks, optimizer=optimizer, **options)
        fit(trainer, self.steps, self.checkpoint.with_suffix(f".{part}"))
        return trainer

    @torch.no_grad()
    def test_loss(self, model: nn.Module) -> float:
        """Return the loss in nats a word on unseen text."""
        model.eval()
        ids, targets = self.test
        return F.cross_entropy(model(ids), targets).item()

    def memory(self) -> Record:
        """Return the peak tensor memory of a step of w and of one of ψ, over a training step of plain LoRA."""
        model = self.adapted().train()
        x, y = (part[:BATCH] for part in self.examples[TEXT])
        batch = x, (y, torch.full((BATCH,), TEXT))
        weights = [p for name, p in model.named_parameters() if ".lora_" in name and ".lora_dropout" not in name]
        optimizer, dropout = torch.optim.Adam(weights), nn.Dropout(0.1)
        for module in model.modules():
            if hasattr(module, "lora_dropout"):
                module.lora_dropout["default"] = dropout

        def plain() -> None:
            optimizer.zero_grad()
            of_both(model(x), batch[1]).backward()
            optimizer.step()

        most = _bytes(model, weights, plain)
        tuned = self.adapted().train()
        partnets.partition(tuned, PROPORTIONS, scheme="nested", example=x[:2])
        steps, psi = optim.Adam(tuned), [tuned.dropout, tuned.sources]
        of_psi = torch.optim.Adam([parameter for one in psi for parameter in one.parameters()])
        by = {tuned.dropout: None, tuned.sources: AHEAD}

        def learn(batch: Any) -> Tensor:
            return tuned.sources(tuned(batch[0]), batch[1]).mean()

        def judge(batch: Any) -> Tensor:
            return of_text(tuned(batch[0]), batch[1])

        calls = {
            "of_w": lambda: partnets.step_weights(tuned, steps, 1, batch, learn),
            "of_psi": lambda: partnets.step_lookahead(tuned, steps, of_psi, {2: (batch, [batch])}, learn, judge, by=by),
        }
        return {name: _bytes(tuned, steps.parameters(), call) / most for name, call in calls.items()}


def _bytes(model: nn.Module, learned: Sequence[Tensor], call: Callable[[], object]) -> int:
    """Return the peak bytes of tensors in a call: the model's, two moments of trained weights, and its allocations."""
    kept = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
    return kept + 2 * sum(tensor.nbytes for tensor in learned) + of_tensors(call)
