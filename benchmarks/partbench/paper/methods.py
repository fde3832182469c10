"""Methods: learning augmentations with partitioned networks and with what they are compared with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import partnets
from partbench.paper.experiment import Record, rotation
from partbench.paper.recipes import AVERAGED, Recipe, files_of, first_affine, recipe, small_affine
from partbench.paper.runs import fit
from partnets import baselines, hyper
from partnets.data import Data, Normalise, ToFloat, load

# The trainings of a search share the cost of one partitioned run.
TRIALS = 6
# Of the augmentations that searches try (Appendix G), in the units of hyper.Affine, whose half-widths are positive.
LEAST = 1e-3
SPACE = {
    "translate_x": (LEAST, 0.25),
    "translate_y": (LEAST, 0.25),
    "rotation": (LEAST, 180.0),
    "scale": (LEAST, 0.5),
    "stretch": (LEAST, 0.5),
    "shear": (LEAST, 0.5),
}
VALIDATION = 0.1
# Of finetuning on all data: its learning rate, as a part of the first (Appendix I.4: 0.01 of 0.1), and its length.
FINETUNE_LR = 0.1
FINETUNE_EPOCHS = 20
EVALUATION_BATCH = 250
# Of the last-layer method: with as many as 800 the network knows its data by heart, and ψ goes back (digits, seed 0).
PRETRAINING = 200
# Of the recipe: the share of the steps in which ψ is sought, and after each how many it has a step. What learns
# directly has as many times the learning rate, and gets as far; what looks ahead has noisier gradients, and goes
# astray by that.
SEARCH, EVERY = 0.4, 4


def partition(model: nn.Module, proportions: Sequence[float], data: Data, scheme: str, seed: int) -> None:
    """partnets.partition, in place; nested partitions have two of the data's images or rows as their example.

    With "weights" they are nested, and proportions are those of the weights.
    """
    measure = {"nested": "units", "weights": "weights"}.get(scheme)
    nested = {"scheme": "nested", "example": torch.as_tensor(data.train[0][:2]), "proportions_of": measure}
    partnets.partition(model, proportions, seed=seed, **(nested if measure else {"scheme": scheme}))


class Learner:
    """One data set, one recipe, one seed; each method is a function of the same name that gives numbers."""

    # The memory format of convolutions' weights.
    memory_format = torch.contiguous_format

    def __init__(self, recipe: Recipe, data: Data, seed: int, steps: int, checkpoint: Path) -> None:
        self.recipe, self.data, self.seed, self.steps, self.checkpoint = recipe, data, seed, steps, checkpoint

    @classmethod
    def of(cls, setting: Record, checkpoint: Path) -> Learner:
        """What an experiment's setting says: dataset, seed and steps; rotated, examples and quick where they matter."""
        seed, chosen = setting["seed"], recipe(setting["dataset"], setting.get("quick", False))
        data = load(files_of(setting["dataset"]), rotated=setting.get("rotated", True), seed=seed)
        if "examples" in setting:
            data = data.subset(setting["examples"], seed=seed)
        made = cls(chosen, data, seed, setting["steps"], checkpoint)
        if setting.get("bfloat16"):
            made.memory_format = torch.channels_last
        return made

    # --- the methods of Table 1 and Fig. 3 ---

    def standard(self) -> Record:
        """Without augmentation."""
        model = nn.Sequential(ToFloat(), self.network())
        return self.result(self.train(*baselines.whole(model, self.data.train), batch_size=self.recipe.plain_batch))

    def partitioned(
        self,
        proportions: Sequence[float] | None = None,
        parameters: Sequence[float] | None = None,
        augmentation: nn.Module | None = None,
        scheme: str = "weight",
        **options,
    ) -> Record:
        """The paper's method: the chunks' proportions, the weights' if they differ, ψ as it starts, and the scheme.

        options: of the trainer.
        """
        proportions = self.recipe.proportions if proportions is None else proportions
        augmentation = self.recipe.augmentation() if augmentation is None else augmentation
        model = self.model(augmentation)
        parameters = proportions if parameters is None else parameters
        partition(model, parameters, self.data, scheme, self.seed)
        chunks = partnets.chunk(self.data.train, proportions, seed=self.seed)
        return self.result(self.train(model, chunks, hyper=augmentation, **options))

    def nested(self) -> Record:
        """Subnetworks that are narrower networks."""
        return self.partitioned(scheme="nested")

    def one_pass(self) -> Record:
        """All partitions and ψ learn in each step, from parts of one batch (Appendix C)."""
        return self.partitioned(one_pass=True)

    def ensemble(self) -> Record:
        """C networks, the k-th trained on chunks 1..k, each for as many steps as one of the other methods."""
        augmentation = self.recipe.augmentation()
        chunks = partnets.chunk(self.data.train, self.recipe.proportions, seed=self.seed)
        count = chunks.count
        model = baselines.Ensemble([self.model(augmentation) for _ in range(count)])
        options = {"hyper": augmentation, "sampling": [1 / count] * count, "hyper_every": count}
        return self.result(self.train(model, chunks, steps=count * self.steps, **options))

    def validation(self, proportion: float = VALIDATION) -> Record:
        """ψ on a validation set; then the network finetuned on all data, with the augmentation that was found."""
        augmentation = self.recipe.augmentation()
        model, chunks = self.held_out(augmentation, proportion)
        result = self.result(self.train(model, chunks, hyper=augmentation, sampling=(1, 0)))
        whole = baselines.whole(partnets.finalize(model, "finetune"), self.data.train, seed=self.seed)
        steps = -(-FINETUNE_EPOCHS * len(self.data.train[1]) // self.recipe.batch)
        finetuned = self.result(self.train(*whole, lr=FINETUNE_LR * self.recipe.lr, steps=steps, part=".finetuning"))
        return {**result, "finetuned_accuracy": finetuned["accuracy"], "finetuned_loss": finetuned["loss"]}

    def augerino(self, safe: bool = True) -> Record:
        """Augmentations on the training loss, with a bonus for their width."""
        augmentation = first_affine()
        whole = baselines.whole(self.model(augmentation), self.data.train, seed=self.seed)
        return self.result(self.train(*whole, baselines.Augerino, hyper=augmentation, safe=safe, hyper_lr=0.05))

    # --- the recipe, and what else takes as many passes ---

    def longer(self) -> Record:
        """Without augmentation, for as many passes as w and ψ take elsewhere."""
        model = nn.Sequential(ToFloat(), self.network())
        whole = baselines.whole(model, self.data.train)
        return self.result(self.train(*whole, batch_size=self.recipe.plain_batch, steps=2 * self.steps))

    def retraining(self) -> Record:
        """The recipe: what the classes do not change with learned directly, what helps in training by looking ahead;
        then a network from scratch, on all data, with both."""
        psi = self.augmentations()
        model = self.model(nn.Sequential(*psi))
        partition(model, self.recipe.proportions, self.data, "weight", self.seed)
        chunks = partnets.chunk(self.data.train, self.recipe.proportions, seed=self.seed)
        return self.sought(model, chunks, psi)

    def validation_retraining(self) -> Record:
        """The same with a validation set."""
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
        whole = baselines.whole(fresh, self.data.train, seed=self.seed)
        retrained = self.result(self.train(*whole, part=".retrained"))
        psi = {"psi": found["psi"], "psi_in_training": in_training["psi"]}
        return {**retrained, **psi, "lml": lml, "searched_accuracy": found["accuracy"]}

    def tune(self) -> Record:
        """partnets.tune, with as many passes as w and ψ take elsewhere; the network as it is, and averaged."""
        result = partnets.tune(
            nn.Sequential(ToFloat(), self.network()),
            self.data,
            hyper.Affine(),
            steps=self.steps,
            batch_size=self.recipe.batch * self.recipe.samples,
            optimizer=partial(self.recipe.algorithm(torch.optim), weight_decay=self.recipe.weight_decay),
            scheduler=lambda optimizer: self.recipe.scheduler(optimizer, self.steps),
            seed=self.seed,
            resume_from=self.checkpoint,
        )
        found = self.tested(result.model, result.values)
        averaged = self.tested(result.averaged(AVERAGED), {})
        found |= {f"averaged_{what}": averaged[what] for what in ("accuracy", "loss")}
        return {**found, "lml": result.lml, "cost": result.cost, "notes": result.notes}

    def last_layer(self) -> Record:
        """ψ by the marginal likelihood of a last layer, at as many passes as w and ψ take elsewhere."""
        angle = rotation(first_affine().values())
        augmentation = hyper.SchwobelAffine(rotation=(-angle, angle))
        options = {"samples": self.recipe.samples, "batch_size": self.recipe.batch, "seed": self.seed}
        float_first = nn.Sequential(ToFloat(), augmentation)
        steps = 2 * self.steps - PRETRAINING
        model = baselines.last_layer(
            float_first, self.network(), self.data.train, steps=steps, pretraining=PRETRAINING, **options
        )
        return self.tested(model, augmentation.values())

    def search(self, sampler: str, space: Mapping[str, tuple[float, float]] = SPACE, trials: int = TRIALS) -> Record:
        """Trainings with fixed hyperparameters, at the cost of one partitioned run; the best on unseen data."""
        models: list[tuple[float, Record]] = []

        def objective(values: dict[str, float]) -> float:
            trial = len(models)
            torch.manual_seed(trials * self.seed + trial)
            held_out = self.fixed(values)
            trainer = self.train(*held_out, sampling=(1, 0), steps=2 * self.steps // trials, part=f".trial{trial}")
            score = partnets.lml(*held_out, batch_size=EVALUATION_BATCH)
            models.append((score, {**self.result(trainer), "psi": values}))
            return score

        baselines.search(objective, space, trials, sampler=sampler, seed=self.seed)
        return max(models, key=lambda tried: tried[0])[1]

    def fixed(self, values: dict[str, float]):
        """A model with these widths, which has a validation set."""
        return self.held_out(hyper.Affine(**values), VALIDATION)

    def random_search(self) -> Record:
        return self.search("random")

    def tpe(self) -> Record:
        return self.search("tpe")

    def known(self) -> Record:
        """A standard network trained with the rotations that the images have."""
        return self.retrained(hyper.Affine(rotation=180.0))

    def retrained(self, augmentation: nn.Module) -> Record:
        """A standard network trained from scratch, on all data, with an augmentation that stays as it is."""
        whole = baselines.whole(self.model(augmentation), self.data.train, seed=self.seed)
        return self.result(self.train(*whole, part=".retrained"))

    # --- what they share ---

    def network(self) -> nn.Module:
        network = nn.Sequential(Normalise(self.data.mean, self.data.std), self.recipe.network())
        return network.to(memory_format=self.memory_format)

    def loss(self, model: nn.Module) -> Callable:
        """By which the model's weights are trained."""
        return F.cross_entropy

    def model(self, augmentation: nn.Module) -> nn.Module:
        averaged = hyper.Averaged(augmentation, self.network(), samples=self.recipe.samples)
        return nn.Sequential(ToFloat(), averaged)

    def held_out(self, augmentation: nn.Module, proportion: float):
        model = self.model(augmentation)
        return baselines.held_out(model, self.data.train, validation=proportion, seed=self.seed)

    def train(self, model, chunks, kind=partnets.Trainer, *, lr=None, hyper_lr=None, steps=None, part="", **options):
        """The trainer, trained; part: of a training of several parts, its checkpoint's suffix."""
        optimizer, steps = self.recipe.optimizer(model, chunks, lr), self.steps if steps is None else steps
        options = {"hyper": [], **options}
        if (psi := options["hyper"]) != [] and "hyper_optimizer" not in options:
            options["hyper_optimizer"] = torch.optim.Adam(psi.parameters(), lr=hyper_lr or self.recipe.hyper_lr)
        options = {"batch_size": self.recipe.batch, "seed": self.seed, "loss": self.loss(model), **options}
        trainer = kind(model, chunks, optimizer=optimizer, scheduler=self.recipe.scheduler(optimizer, steps), **options)
        fit(trainer, steps, self.checkpoint.with_suffix(part) if part else self.checkpoint)
        return trainer

    def result(self, trainer: partnets.Trainer) -> Record:
        """Test accuracy in percent and loss in nats of the whole network, ψ, and L_ML where there is one."""
        result = self.tested(trainer.model, trainer.values())
        if trainer.chunks.count > 1:
            result["lml"] = partnets.lml(trainer.model, trainer.chunks, batch_size=EVALUATION_BATCH)
        return result

    def tested(self, model: nn.Module, psi: dict[str, float]) -> Record:
        """Test accuracy in percent and loss in nats, and ψ."""
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
