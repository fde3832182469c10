"""Methods that the experiments compare with partitioned networks.

standard training              partnets.Trainer(*partnets.single_chunk(model, data))
validation-set optimisation    partnets.Trainer(*partnets.held_out(model, data), hyper=ψ, sampling=(1, 0)); for
                               finetuning, then standard training of the same model with fixed ψ
"Partitioned (Ens.)"           partnets.Trainer(partnets.Ensemble(models), chunks, hyper=ψ)
Augerino, safe or not          Augerino(*partnets.single_chunk(model, data), hyper=ψ)
federated Augerino             AugerinoClient(partnets.Ensemble([model]), data, hyper=ψ)
random search, TPE             search(train_and_validate, space, trials)
post-hoc Laplace               laplace(model, data)
last-layer marginal likelihood last_layer(ψ, network, data, steps=n)
a global best response         BestResponse(train, weights, optimizer, box=(low, high), ...)
"""

from partbench.baselines.augerino import Augerino
from partbench.baselines.augerino_client import AugerinoClient
from partbench.baselines.best_response import BestResponse
from partbench.baselines.hyper_search import search
from partbench.baselines.laplace_approximation import laplace
from partbench.baselines.last_layer_likelihood import LastLayer, last_layer

__all__ = [
    "Augerino",
    "AugerinoClient",
    "BestResponse",
    "LastLayer",
    "laplace",
    "last_layer",
    "search",
]
