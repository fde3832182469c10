"""All experiments, by name."""

from benchmarks.paper.augmentation import Augmentation
from benchmarks.paper.experiment import Experiment
from benchmarks.paper.extractor import Extractor
from benchmarks.paper.input_mask import InputMask
from benchmarks.paper.input_selection import InputSelection
from benchmarks.paper.retraining import Retraining
from benchmarks.paper.sensitivity import Sensitivity
from benchmarks.paper.validation import Validation

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        InputSelection(),
        InputMask(),
        Augmentation(),
        Validation(),
        Extractor(),
        Sensitivity(),
        Retraining(),
    )
}
