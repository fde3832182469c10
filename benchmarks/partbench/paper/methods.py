"""Methods: learning augmentations with partitioned networks and with the methods that they are compared with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import partnets
from partbench import baselines
from partbench.datasets import load, subset
from partbench.paper.augmentations import SchwobelAffine
from partbench.paper.experiment import Record, rotation
from partbench.paper.recipes import AVERAGED, Recipe, cosine, files_of, first_affine, recipe, small_affine
from partbench.paper.runs import fit
from partnets import hyper
from partnets.data import Data, Normalise, ToFloat
from partnets.nn.fixup import Bias, Scale
from partnets.subnetworks.rules import rule_of

# The trainings of a search, which together cost as much as one partitioned run.
TRIALS = 6
# Ranges of the augmentations that searches try (Appendix G), in units of hyper.Affine, with positive half-widths.
LEAST = 1e-3
Space = Mapping[str, tuple[float, float]]
SPACE = {
    "translate_x": (LEAST, 0.25),
    "translate_y": (LEAST, 0.25),
    "rotation": (LEAST, 180.0),
    "scale": (LEAST, 0.5),
    "stretch": (LEAST, 0.5),
    "shear": (LEAST, 0.5),
}
VALIDATION = 0.1
# Finetuning on all data: its learning rate over the first one (Appendix I.4: 0.01 over 0.1), and its length.
FINETUNE_LR = 0.1
FINETUNE_EPOCHS = 20
EVALUATION_BATCH = 250
# Steps before ψ learns in the last-layer method: after 800, the network has memorised its data, and ψ falls back
# (digits, seed 0).
PRETRAINING = 200
# In `retraining`: the share of steps in which ψ is learned, and the steps of the weights for each step of ψ. Direct ψ
# has as many times the learning rate, and gets as far. ψ learned by lookahead has noisier gradients, and would go
# astray with it.
SEARCH, EVERY = 0.4, 4


def partition(model: nn.Module, proportions: Sequence[float], data: Data, scheme: str, seed: int) -> None:
    """Partition the model in place; nested partitions use two of the data's images or rows as the example.

    With "weights", partitions are nested and the proportions are those of the weights.
    """
    measure = {"nested": "channels", "weights": "weights"}.get(scheme)
    nested = {"scheme": "nested", "example": torch.as_tensor(data.train[0][:2]), "proportions_of": measure}
    partnets.partition(model, proportions, seed=seed, **(nested if measure else {"scheme": scheme}))


class Learner:
    """The methods for one data set and seed; each is a function of the same name that returns numbers."""

    # The memory format of convolutions' weights, and the space of searches.
    memory_format = torch.contiguous_format
    space: Space = SPACE

    def __init__(self, recipe: Recipe, data: Data, seed: int, steps: int, checkpoint: Path) -> None:
        self.recipe, self.data, self.seed, self.steps, self.checkpoint = recipe, data, seed, steps, checkpoint

    @classmethod
    def of(cls, setting: Record, checkpoint: Path) -> Learner:
        """Return the learner of a setting: dataset, seed and steps; rotated, examples and quick if given."""
        seed, chosen = setting["seed"], recipe(setting["dataset"], setting.get("quick", False))
        data = load(files_of(setting["dataset"]), rotated=setting.get("rotated", True), seed=seed)
        if "examples" in setting:
            data = subset(data, setting["examples"], seed=seed)
        made = cls(chosen, data, seed, setting["steps"], checkpoint)
        if setting.get("bfloat16"):
            made.memory_format = torch.channels_last
        return made

    # --- the methods of Table 1 and Fig. 3 ---

    def standard(self, **options) -> Record:
        """Train without augmentation."""
        model = nn.Sequential(ToFloat(), self.network())
        whole = partnets.single_chunk(model, self.data.train)
        return self.result(self.train(*whole, batch_size=self.recipe.plain_batch, **options))

    def partitioned(
        self,
        proportions: Sequence[float] | None = None,
        parameters: Sequence[float] | None = None,
        augmentation: nn.Module | None = None,
        scheme: str = "weight",
        **options,
    ) -> Record:
        """Train by the paper's method; `parameters` are the weights' proportions if they differ from the chunks'.

        options: of the trainer.
        """
        proportions = self.recipe.proportions if proportions is None else proportions
        augmentation = self.recipe.augmentation() if augmentation is None else augmentation
        model = self.model(augmentation)
        parameters = proportions if parameters is None else parameters
        partition(model, parameters, self.data, scheme, self.seed)
        chunks = partnets.chunk(self.data.train, proportions, seed=self.seed)
        return self.result(self.train(model, chunks, hyper=augmentation, **options))

    def partitioned_longer(self) -> Record:
        """Train by the paper's method for twice the steps."""
        return self.partitioned(steps=2 * self.steps)

    def scalars_first(self) -> Record:
        """Train by the paper's method, with FixUp's biases and scales, each a single number, in partition 1."""
        names = {Bias: "bias", Scale: "scale"}
        before = {kind: rule_of(kind) for kind in names}
        for kind, name in names.items():
            partnets.register(kind, partnets.Rule(weights=(name,)))
        try:
            return self.partitioned()
        finally:
            for kind, rule in before.items():
                partnets.register(kind, rule)

    def nested(self) -> Record:
        """Train subnetworks that are narrower networks."""
        return self.partitioned(scheme="nested")

    def one_pass(self) -> Record:
        """Train all partitions and ψ in each step, from parts of one batch (Appendix C)."""
        return self.partitioned(one_pass=True)

    def ensemble(self) -> Record:
        """Train C networks, the k-th on chunks 1..k, each for as many steps as a network of the other methods."""
        augmentation = self.recipe.augmentation()
        chunks = partnets.chunk(self.data.train, self.recipe.proportions, seed=self.seed)
        count = len(chunks)
        model = partnets.Ensemble([self.model(augmentation) for _ in range(count)])
        options = {"hyper": augmentation, "sampling": [1 / count] * count, "hyper_every": count}
        return self.result(self.train(model, chunks, steps=count * self.steps, **options))

    def validation(self, proportion: float = VALIDATION) -> Record:
        """Learn ψ on a validation set; then finetune the network on all data with the learned augmentation."""
        augmentation = self.recipe.augmentation()
        model, chunks = self.held_out(augmentation, proportion)
        result = self.result(self.train(model, chunks, hyper=augmentation, sampling=(1, 0)))
        whole = partnets.single_chunk(partnets.finalize(model, "finetune"), self.data.train, seed=self.seed)
        steps = -(-FINETUNE_EPOCHS * len(self.data.train[1]) // self.recipe.batch)
        finetuned = self.result(self.train(*whole, lr=FINETUNE_LR * self.recipe.lr, steps=steps, part=".finetuning"))
        return {**result, "finetuned_accuracy": finetuned["accuracy"], "finetuned_loss": finetuned["loss"]}

    def augerino(self, safe: bool = True) -> Record:
        """Learn augmentations by the training loss with a bonus for their width."""
        augmentation = first_affine()
        whole = partnets.single_chunk(self.model(augmentation), self.data.train, seed=self.seed)
        return self.result(self.train(*whole, baselines.Augerino, hyper=augmentation, safe=safe, hyper_lr=0.05))

    # --- retraining, and methods of equal cost ---

    def longer(self) -> Record:
        """Train without augmentation, for as many passes as w and ψ take elsewhere."""
        return self.standard(steps=2 * self.steps)

    def retraining(self) -> Record:
        """Learn invariances directly and training augmentations by lookahead, then train with both.

        The last training is of a new network on all data.
        """
        psi = self.augmentations()
        model = self.model(nn.Sequential(*psi))
        partition(model, self.recipe.proportions, self.data, "weight", self.seed)
        chunks = partnets.chunk(self.data.train, self.recipe.proportions, seed=self.seed)
        return self.sought(model, chunks, psi)

    def validation_retraining(self) -> Record:
        """Do the same with a validation set in place of partitions."""
        psi = self.augmentations()
        return self.sought(*self.held_out(nn.Sequential(*psi), VALIDATION), psi, sampling=(1, 0))

    def augmentations(self) -> list[hyper.Hyperparameter]:
        return [self.recipe.augmentation(), hyper.InTraining(small_affine())]

    def sought(self, model, chunks, psi: Sequence[hyper.Hyperparameter], **options) -> Record:
        lr = self.recipe.hyper_lr
        rates = [EVERY * lr if one.hyper_gradient == "direct" else lr for one in psi]
        groups = [{"params": list(one.parameters()), "lr": rate} for one, rate in zip(psi, rates, strict=True)]
        options |= {"hyper": psi, "hyper_every": EVERY, "hyper_optimizer": torch.optim.Adam(groups)}
        self.train(model, chunks, steps=round(SEARCH * self.steps), part=".search", **options)
        found, in_training = (self.tested(model, one.values()) for one in psi[:2])
        lml = partnets.lml(model, chunks, batch_size=EVALUATION_BATCH)
        fresh = partnets.finalize(model, "retrain", seed=self.seed)
        torch.manual_seed(self.seed)
        whole = partnets.single_chunk(fresh, self.data.train, seed=self.seed)
        retrained = self.result(self.train(*whole, part=".retrained"))
        psi = {"psi": found["psi"], "psi_in_training": in_training["psi"]}
        return {**retrained, **psi, "lml": lml, "searched_accuracy": found["accuracy"]}

    def tune(self) -> Record:
        """Run partnets.tune for as many passes as w and ψ take elsewhere; test its network, also averaged."""
        result = partnets.tune(
            nn.Sequential(ToFloat(), self.network()),
            self.data,
            hyper.Affine(),
            steps=self.steps,
            batch_size=self.recipe.batch * self.recipe.samples,
            optimizer=partial(self.recipe.algorithm(torch.optim), weight_decay=self.recipe.weight_decay),
            scheduler=lambda optimizer: cosine(optimizer, self.steps),
            seed=self.seed,
            resume_from=self.checkpoint,
        )
        found = self.tested(result.model, result.values)
        averaged = self.tested(result.averaged(AVERAGED), {})
        found |= {f"averaged_{what}": averaged[what] for what in ("accuracy", "loss")}
        return {**found, "lml": result.lml, "cost": result.cost, "notes": result.notes}

    def last_layer(self) -> Record:
        """Learn ψ by the marginal likelihood of a last layer, for as many passes as w and ψ take elsewhere."""
        angle = rotation(first_affine().values())
        augmentation = SchwobelAffine(rotation=(-angle, angle))
        options = {"samples": self.recipe.samples, "batch_size": self.recipe.batch, "seed": self.seed}
        options["lr"] = self.recipe.lr / 4  # pretraining has four times this rate
        float_first = nn.Sequential(ToFloat(), augmentation)
        steps = 2 * self.steps - PRETRAINING
        model = baselines.last_layer(
            float_first, self.network(), self.data.train, steps=steps, pretraining=PRETRAINING, **options
        )
        return self.tested(model, augmentation.values())

    def search(self, sampler: str, trials: int = TRIALS, space: Space | None = None) -> Record:
        """Train with fixed hyperparameters, at the cost of one partitioned run; return the best on unseen data."""
        models: list[tuple[float, Record]] = []

        def objective(values: dict[str, float]) -> float:
            trial = len(models)
            torch.manual_seed(trials * self.seed + trial)
            held_out = self.fixed(values)
            trainer = self.train(*held_out, sampling=(1, 0), steps=2 * self.steps // trials, part=f".trial{trial}")
            score = partnets.lml(*held_out, batch_size=EVALUATION_BATCH)
            models.append((score, {**self.result(trainer), "psi": values}))
            return score

        baselines.search(objective, space or self.space, trials, sampler=sampler, seed=self.seed)
        return max(models, key=lambda tried: tried[0])[1]

    def fixed(self, values: dict[str, float]):
        """Return a model with these widths, and chunks with a validation set."""
        return self.held_out(hyper.Affine(**values), VALIDATION)

    def random_search(self) -> Record:
        return self.search("random")

    def tpe(self) -> Record:
        return self.search("tpe")

    def known(self) -> Record:
        """Train a standard network with the rotations that the images have."""
        return self.retrained(hyper.Affine(rotation=180.0))

    def retrained(self, augmentation: nn.Module) -> Record:
        """Train a standard network from scratch on all data, with a fixed augmentation."""
        whole = partnets.single_chunk(self.model(augmentation), self.data.train, seed=self.seed)
        return self.result(self.train(*whole, part=".retrained"))

    # --- shared parts ---

    def network(self) -> nn.Module:
        network = nn.Sequential(Normalise(self.data.mean, self.data.std), self.recipe.network())
        return network.to(memory_format=self.memory_format)

    def loss(self, model: nn.Module) -> Callable:
        """Return the loss by which the model's weights are trained."""
        return F.cross_entropy

    def model(self, augmentation: nn.Module) -> nn.Module:
        averaged = hyper.Averaged(augmentation, self.network(), samples=self.recipe.samples)
        return nn.Sequential(ToFloat(), averaged)

    def held_out(self, augmentation: nn.Module, proportion: float):
        model = self.model(augmentation)
        return partnets.held_out(model, self.data.train, validation=proportion, seed=self.seed)

    def train(self, model, chunks, kind=partnets.Trainer, *, steps=None, part="", **options):
        """Return the trainer after training; `part` is the checkpoint's suffix if a method trains several times."""
        steps = self.steps if steps is None else steps
        trainer = self.trainer(model, chunks, kind, steps, **options)
        fit(trainer, steps, self.checkpoint.with_suffix(part) if part else self.checkpoint)
        return trainer

    def trainer(self, model, chunks, kind, steps, *, lr=None, hyper_lr=None, **options):
        optimizer = self.recipe.optimizer(model, chunks, lr)
        options = {"hyper": [], **options}
        if (psi := options["hyper"]) != [] and "hyper_optimizer" not in options:
            options["hyper_optimizer"] = torch.optim.Adam(psi.parameters(), lr=hyper_lr or self.recipe.hyper_lr)
        options = {"batch_size": self.recipe.batch, "seed": self.seed, "loss": self.loss(model), **options}
        return kind(model, chunks, optimizer=optimizer, scheduler=cosine(optimizer, steps), **options)

    def result(self, trainer: partnets.Trainer) -> Record:
        """Return the test accuracy in percent, the test loss in nats, ψ, and L_ML if there are several chunks."""
        result = self.tested(trainer.model, trainer.values())
        if len(trainer.chunks) > 1:
            result["lml"] = partnets.lml(trainer.model, trainer.chunks, batch_size=EVALUATION_BATCH)
        return result

    def tested(self, model: nn.Module, psi: dict[str, float]) -> Record:
        """Return the test accuracy in percent, the test loss in nats, and ψ."""
        model = copy.deepcopy(model)
        for part in model.modules():
            if isinstance(part, hyper.Averaged):
                part.samples = self.recipe.test_samples or part.samples
        torch.manual_seed(self.seed)
        return {
            "accuracy": 100 * partnets.accuracy(model, self.data.test, batch_size=EVALUATION_BATCH),
            "loss": partnets.mean_loss(model, self.data.test, batch_size=EVALUATION_BATCH),
            "psi": {name.rpartition(".")[2]: value for name, value in psi.items()},
        }
