"""The client app; Flower finds it through pyproject.toml."""

from functools import partial

from partnets import optim
from partnets.federated.flower import client_app
from rotated_digits.task import BATCH, LR, PROPORTIONS, load_data, make_model

app = client_app(make_model, load_data, proportions=PROPORTIONS, optimizer=partial(optim.SGD, lr=LR), batch_size=BATCH)
