"""The paper's experiments, one command each, on data that are here: python -m benchmarks.paper --help.

recipes, methods    how networks are trained, and what is compared
experiment          what an experiment is; input_selection, ..., retraining: one each
runs, report        trainings that survive an interruption; what is kept of them, and the documentation's page
"""

from benchmarks.paper.augmentation import Augmentation
from benchmarks.paper.experiment import Experiment
from benchmarks.paper.extractor import Extractor
from benchmarks.paper.input_mask import InputMask
from benchmarks.paper.input_selection import InputSelection
from benchmarks.paper.retraining import Retraining
from benchmarks.paper.sensitivity import Sensitivity
from benchmarks.paper.validation import Validation

_ALL = InputSelection(), InputMask(), Augmentation(), Validation(), Extractor(), Sensitivity(), Retraining()
EXPERIMENTS: dict[str, Experiment] = {experiment.name: experiment for experiment in _ALL}
