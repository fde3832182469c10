"""Privacy: bounds each client's influence and hides it in noise, on the client or on the server."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from partnets.federated.vectors import HYPER, Vectors, norm
from partnets.utils.checks import check_at_least

# The smallest noise multiplier for which epsilon uses privacy loss distributions: below it they exceed any memory.
LITTLE = 0.1


@dataclass(frozen=True)
class Privacy:
    """The Gaussian mechanism, applied to each vector that a client sends separately (McMahan et al. 2018).

    With `Client(privacy=...)` each update is hidden from the server too (local differential privacy); no loss is sent.
    With `Server(privacy=...)` clients are hidden in the means (central differential privacy), and the server must be
    trusted; the mean of n clients then has noise of z max_norm / n, instead of z max_norm / sqrt(n) with local privacy.

    The guarantee is for a whole client: whether its update counts or is 0, given that participation is known. Noise is
    drawn at each call from the operating system's cryptographic randomness, so rounds cannot be repeated bit for bit.
    Not covered are the rounding of noise to floating point, and the server's reports besides the model, such as L_ML,
    counts and losses.

    Args:
        max_norm: the Euclidean norm to which the change of each vector of weights is clipped.
        noise_multiplier: z, the noise's standard deviation in units of this norm; 0 only clips.
        hyper_max_norm: the same for the gradient of ψ; max_norm if None.

    Raises:
        ValueError: an argument is out of range.

    Example:
        >>> import partnets
        >>> from torch import nn
        >>> vectors = Vectors(partnets.partition(nn.Linear(4, 3), (0.5, 0.5)))
        >>> privacy = Privacy(max_norm=1.0, noise_multiplier=10.0)
        >>> privacy.clipped({"w1.float32": torch.tensor([3.0, 4.0])})
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

    def clipped(self, vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Clip each vector to its bound separately, in double precision.

        Vectors that are not finite become 0: an error would reveal that the client diverged.
        """
        found = {}
        for name, vector in vectors.items():
            length = norm({name: vector})
            scale = min(1.0, self._bound(name) / length) if length else 1.0
            found[name] = vector.double() * scale if math.isfinite(length) else torch.zeros_like(vector.double())
        return found

    def noisy(self, vectors: Mapping[str, Tensor], share: float = 1.0) -> dict[str, Tensor]:
        """Add noise to the vectors; share is the weight of one update in them, 1/n in a mean of n."""
        if not self.noise_multiplier:
            return dict(vectors)
        scales = {name: self.noise_multiplier * self._bound(name) * share for name in vectors}
        return {name: vector.double() + _normal(len(vector)) * scales[name] for name, vector in vectors.items()}

    def epsilon(self, vectors: Vectors, rounds: int, delta: float) -> float:
        """Compute ε of (ε, δ)-differential privacy for a client that takes part in every one of these rounds.

        A client sends several vectors a round, up to one for each partition and one for ψ, with independent noise. N
        vectors in total count as one Gaussian mechanism with noise multiplier z / sqrt(N). Rounds in which a client may
        not have been drawn give no reduction.

        Args:
            vectors: the attribute `vectors` of the server or of a client.
            rounds: the largest number of rounds in which a client takes part.
            delta: δ, in (0, 1); less than one over the number of clients.

        Raises:
            ImportError: dp-accounting is not installed.
            ValueError: an argument is out of range.
        """
        check_at_least(1, rounds=rounds)
        if not 0 < delta < 1:
            raise ValueError(f"delta={delta}; pass a number between 0 and 1, such as 1e-5.")
        if not self.noise_multiplier:
            return math.inf
        try:
            from dp_accounting.dp_event import GaussianDpEvent
            from dp_accounting.pld import PLDAccountant
            from dp_accounting.rdp import RdpAccountant
        except ImportError as error:
            raise ImportError("Privacy.epsilon needs dp-accounting: pip install 'partkernels[federated]'.") from error
        sent = max(sum(map(len, vectors.sent_by(chunk))) for chunk in range(1, vectors.num_partitions + 1))
        multiplier = self.noise_multiplier / math.sqrt(sent * rounds)
        # Privacy loss distributions are exact, but with little noise they are too long for any memory.
        accountant = PLDAccountant() if multiplier >= LITTLE else RdpAccountant()
        accountant.compose(GaussianDpEvent(multiplier))
        return float(accountant.get_epsilon(delta))

    def _bound(self, name: str) -> float:
        is_hyper = name.startswith(f"{HYPER}.") and self.hyper_max_norm is not None
        return self.hyper_max_norm if is_hyper else self.max_norm


def _normal(count: int) -> Tensor:
    """Draw standard normal numbers (Box and Muller 1958), each from 53 random bits of the operating system.

    torch's and NumPy's generators are not secure: torch's CPU generator has only 2**32 seeds, which can be searched.
    """
    half = (count + 1) // 2
    bits = torch.frombuffer(bytearray(os.urandom(16 * half + 16)), dtype=torch.int64)[: 2 * half]
    uniform = ((bits & ((1 << 53) - 1)).double() + 0.5) / (1 << 53)  # in (0, 1)
    radius, angle = (-2 * uniform[:half].log()).sqrt(), 2 * math.pi * uniform[half:]
    return torch.cat([radius * angle.cos(), radius * angle.sin()])[:count]
