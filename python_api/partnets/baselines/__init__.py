"""Baselines for comparison with partitioned networks, most of them with the same trainer.

standard training              Trainer(*whole(model, data))
validation-set optimisation    Trainer(*held_out(model, data), hyper=ψ, sampling=(1, 0)); for finetuning, then
                               standard training of the same model with fixed ψ
"Partitioned (Ens.)"           Trainer(Ensemble(models), chunks, hyper=ψ)
Augerino, safe or not          Augerino(*whole(model, data), hyper=ψ)
grid, random search, TPE       search(train_and_validate, space, trials)
post-hoc Laplace               laplace(model, data)
last-layer marginal likelihood last_layer(ψ, network, data, steps=n)
implicit and iterative         bilevel(train, validate, weights, hyper, method=...), of functions of tensors; for a
differentiation, best          single hypergradient: hypergradient(...)
responses, fixed values
noise, sinusoids, replays      bilevel(train, validate, weights, schedules.gaussian(hyper), method="fixed")
"""

from partnets.baselines import schedules
from partnets.baselines.augerino import Augerino
from partnets.baselines.bilevel_descent import Bilevel, bilevel
from partnets.baselines.ensemble import Ensemble
from partnets.baselines.hyper_search import search
from partnets.baselines.hypergradients import Hypergradient, hypergradient
from partnets.baselines.laplace_approximation import laplace
from partnets.baselines.last_layer_likelihood import LastLayer, last_layer
from partnets.baselines.standard import held_out, whole

__all__ = [
    "Augerino",
    "Bilevel",
    "Ensemble",
    "Hypergradient",
    "LastLayer",
    "bilevel",
    "held_out",
    "hypergradient",
    "laplace",
    "last_layer",
    "schedules",
    "search",
    "whole",
]
