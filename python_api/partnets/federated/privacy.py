"""Privacy: what one client's examples can change is bounded and hidden in noise, by the client or by the server."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from partnets.federated.update import names_of, norm
from partnets.federated.vectors import HYPER, Vectors
from partnets.utils.checks import check_at_least

# A noise multiplier.
LITTLE = 0.1


@dataclass(frozen=True)
class Privacy:
    """The Gaussian mechanism, on each vector that a client sends by itself (McMahan et al. 2018).

    Given to `Client`, it hides each update from the server too (local differential privacy), and no loss is sent. Given
    to `Server`, which must be trusted, it hides clients in the means (central): a mean of n clients then has noise of
    z max_norm / n, where it would have z max_norm / sqrt(n) if each had hidden itself.

    The guarantee is for a client as a whole: whether what it has learned counts or is 0, where who takes part is known.
    Noise is drawn anew at each call, each number from the operating system's cryptographic randomness: no seed can be
    searched for, and rounds are not repeated to the bit. It is rounded to floating point, which is not covered, and
    neither is what the server reports beside the model, as L_ML, counts and losses.

    Args:
        max_norm: to which the change of each vector of weights is shortened, as a Euclidean norm.
        noise_multiplier: z, the noise's standard deviation in units of this norm; 0 shortens only.
        hyper_max_norm: likewise for the gradient of ψ; max_norm if None.

    Raises:
        ValueError: an argument is out of range.

    Example:
        >>> import partnets
        >>> from torch import nn
        >>> vectors = Vectors(partnets.partition(nn.Linear(4, 3), (0.5, 0.5)))
        >>> privacy = Privacy(max_norm=1.0, noise_multiplier=10.0)
        >>> privacy.shortened({"w1.float32": torch.tensor([3.0, 4.0])})
        {'w1.float32': tensor([0.6000, 0.8000], dtype=torch.float64)}
        >>> round(privacy.epsilon(vectors, rounds=20, delta=1e-5), 1)
        2.6
    """

    max_norm: float
    noise_multiplier: float
    hyper_max_norm: float | None = None

    def __post_init__(self) -> None:
        for name in ("max_norm", "hyper_max_norm"):
            bound = getattr(self, name)
            if not (bound is None and name == "hyper_max_norm") and not 0 < bound < math.inf:
                raise ValueError(f"{name}={bound}; pass a finite number above 0.")
        if not 0 <= self.noise_multiplier < math.inf:
            raise ValueError(f"noise_multiplier={self.noise_multiplier}; pass a finite number, 0 or more.")

    def shortened(self, vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Each vector, in double precision, by itself scaled down to its bound where it is longer.

        One that is not finite becomes 0: an error would tell that its client diverged.
        """
        found = {}
        for name, vector in vectors.items():
            length = norm({name: vector})
            scale = min(1.0, self._bound(name) / length) if length else 1.0
            found[name] = vector.double() * scale if math.isfinite(length) else torch.zeros_like(vector.double())
        return found

    def noisy(self, vectors: Mapping[str, Tensor], share: float = 1.0) -> dict[str, Tensor]:
        """The vectors with noise; share is how much of one update there is in them, 1/n in a mean of n."""
        if not self.noise_multiplier:
            return dict(vectors)
        scales = {name: self.noise_multiplier * self._bound(name) * share for name in vectors}
        return {name: vector.double() + _normal(len(vector)) * scales[name] for name, vector in vectors.items()}

    def epsilon(self, vectors: Vectors, rounds: int, delta: float) -> float:
        """ε of (ε, δ)-differential privacy of one client that takes part in each of so many rounds.

        It sends several vectors in a round, up to one for each partition and ψ, each with noise of its own: as one
        Gaussian mechanism whose z is that of a vector over the root of their number in all. Nothing is taken off for
        rounds in which a client may not have been drawn.

        Args:
            vectors: of the server or of a client.
            rounds: in which a client takes part at most.
            delta: in (0, 1); below one over the number of clients.

        Raises:
            ImportError: dp-accounting is not installed.
            ValueError: an argument is out of range.
        """
        check_at_least(1, rounds=rounds)
        if not 0 < delta < 1:
            raise ValueError(f"delta={delta}; pass a number between 0 and 1, as 1e-5.")
        if not self.noise_multiplier:
            return math.inf
        try:
            from dp_accounting.dp_event import GaussianDpEvent
            from dp_accounting.pld import PLDAccountant
            from dp_accounting.rdp import RdpAccountant
        except ImportError as error:
            raise ImportError("Privacy.epsilon needs dp-accounting: pip install 'partkernels[federated]'.") from error
        sent = max(sum(map(len, names_of(vectors, chunk))) for chunk in range(1, vectors.count + 1))
        multiplier = self.noise_multiplier / math.sqrt(sent * rounds)
        # Privacy loss distributions are exact, and with so little noise too long for any memory.
        accountant = PLDAccountant() if multiplier >= LITTLE else RdpAccountant()
        accountant.compose(GaussianDpEvent(multiplier))
        return float(accountant.get_epsilon(delta))

    def _bound(self, name: str) -> float:
        own = name.startswith(f"{HYPER}.") and self.hyper_max_norm is not None
        return self.hyper_max_norm if own else self.max_norm


def _normal(count: int) -> Tensor:
    """Standard normal numbers (Box and Muller 1958) from the operating system, of 53 random bits each.

    torch's and NumPy's generators are none for this: of torch's on a CPU there are 2**32, and one that fits is found.
    """
    half = (count + 1) // 2
    bits = torch.frombuffer(bytearray(os.urandom(16 * half + 16)), dtype=torch.int64)[: 2 * half]
    uniform = ((bits & ((1 << 53) - 1)).double() + 0.5) / (1 << 53)  # in (0, 1)
    radius, angle = (-2 * uniform[:half].log()).sqrt(), 2 * math.pi * uniform[half:]
    return torch.cat([radius * angle.cos(), radius * angle.sin()])[:count]
