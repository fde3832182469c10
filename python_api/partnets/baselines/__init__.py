"""What partitioned networks are compared with: the same trainer, on networks that are divided otherwise or not at all.

standard training              Trainer(*whole(model, data))
validation-set optimisation    Trainer(*held_out(model, data), hyper=ψ, sampling=(1, 0)), then, with finetuning,
                               standard training of the same model, whose ψ stays
"Partitioned (Ens.)"           Trainer(Ensemble(models), chunks, hyper=ψ)
Augerino, safe or not          Augerino(*whole(model, data), hyper=ψ)
random search, Optuna's TPE    search(train_and_validate, space, trials)
post-hoc Laplace               laplace(model, data)
"""

from partnets.baselines.augerino import Augerino
from partnets.baselines.ensemble import Ensemble
from partnets.baselines.hyper_search import Trial, search
from partnets.baselines.laplace_approximation import laplace
from partnets.baselines.standard import held_out, whole

__all__ = ["Augerino", "Ensemble", "Trial", "held_out", "laplace", "search", "whole"]
