"""A partitioned MLP in numpy that learns by gradient descent which of its inputs are noise, without a validation set.

Each input is kept with its own probability, ψ. Partition k of the weights is trained on chunks 1..k of the data, and ψ
on the loss of subnetwork k - 1 on chunk k, which it has not seen (Mlodozeniec, Reisser and Louizos, ICLR 2023).

usage: python input_mask.py
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

import partkernels_numpy as pkn

PROPORTIONS = (0.8, 0.1, 0.1)
COUNT = len(PROPORTIONS)
USEFUL, NOISE = 6, 24
HIDDEN = 64
TEMPERATURE = 0.5


def data(rng: np.random.Generator, examples: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw examples of two classes that differ in the first inputs; the other inputs are noise."""
    x = rng.standard_normal((examples, USEFUL + NOISE)).astype(np.float32)
    return x, (x[:, 0] * x[:, 1] + x[:, 2:USEFUL].sum(1) > 0).astype(int)


class Linear:
    """A layer with Adam's state for its weight and bias, and one step count per partition."""

    def __init__(self, rng: np.random.Generator, ins: int, outs: int, seed: int) -> None:
        scale = np.sqrt(6 / ins)
        defaults = pkn.Uniform(float(scale), seed=seed)  # regenerated for inactive partitions: no memory
        self.partition = pkn.Partition.random((outs, ins), PROPORTIONS, seed=seed, defaults=defaults)
        self.weight = rng.uniform(-scale, scale, (outs, ins)).astype(np.float32)
        self.bias = np.zeros((COUNT, outs), np.float32)  # subnetwork k uses the sum of the first k rows
        self.moments = np.zeros((outs, ins), np.float32), np.zeros((outs, ins), np.float32)
        self.bias_moments = np.zeros((COUNT, outs), np.float32), np.zeros((COUNT, outs), np.float32)
        self.steps = [0] * COUNT

    def forward(self, x: np.ndarray, active: int) -> np.ndarray:
        self.x = x
        return pkn.linear(x, self.weight, self.partition, active, bias=self.bias)

    def grad_input(self, grad: np.ndarray, active: int) -> np.ndarray:
        return pkn.linear_grad_input(grad, self.weight, self.partition, active)

    def step(self, grad: np.ndarray, update: int, lr: float) -> None:
        """Step partition `update` with Adam; the other entries keep their bits."""
        row = update - 1
        self.steps[row] += 1
        grad_weight = pkn.linear_grad_weight(grad, self.x, self.partition, update)
        pkn.adam_step(self.weight, grad_weight, *self.moments, self.partition, update, step=self.steps[row], lr=lr)
        first, second = self.bias_moments
        pkn.adam_step(self.bias[row], grad.sum(0), first[row], second[row], None, None, step=self.steps[row], lr=lr)


class Network:
    """An input mask and an MLP with two hidden layers."""

    def __init__(self, rng: np.random.Generator) -> None:
        sizes = USEFUL + NOISE, HIDDEN, HIDDEN, 2
        self.layers = [Linear(rng, *shape, seed) for seed, shape in enumerate(pairwise(sizes))]
        self.psi = np.full(USEFUL + NOISE, 1.0, np.float32)  # the logits of the inputs' probabilities
        self.psi_moments = np.zeros_like(self.psi), np.zeros_like(self.psi)
        self.psi_steps = 0

    def probabilities(self) -> np.ndarray:
        return 1 / (1 + np.exp(-self.psi))

    def gradients(self, x: np.ndarray, y: np.ndarray, active: int, rng: np.random.Generator):
        """Return gradients of the mean cross entropy by each layer's output and by ψ, with random (relaxed) masks."""
        uniform = rng.uniform(1e-6, 1 - 1e-6, x.shape).astype(np.float32)
        mask = 1 / (1 + np.exp(-(self.psi + np.log(uniform / (1 - uniform))) / TEMPERATURE))
        outputs, hidden = [], x * mask
        for layer in self.layers:
            outputs.append(layer.forward(hidden, active))
            hidden = np.maximum(outputs[-1], 0)
        likelihoods = np.exp(outputs[-1] - outputs[-1].max(1, keepdims=True))
        grad = likelihoods / likelihoods.sum(1, keepdims=True)
        grad[np.arange(len(y)), y] -= 1
        grad /= len(y)
        grads = []
        for layer, before in zip(self.layers[::-1], [*outputs[-2::-1], None], strict=True):
            grads.append(grad)
            grad = layer.grad_input(grad, active)
            if before is not None:
                grad *= before > 0
        return grads[::-1], (grad * x * mask * (1 - mask)).sum(0) / TEMPERATURE

    def accuracy(self, x: np.ndarray, y: np.ndarray) -> float:
        logits = hidden = x * self.probabilities()
        for layer in self.layers:
            logits = layer.forward(hidden, COUNT)
            hidden = np.maximum(logits, 0)
        return float((logits.argmax(1) == y).mean())


def train(learns_psi: bool, seed: int = 0, steps: int = 3000, batch: int = 64) -> tuple[Network, float]:
    """Return a trained network and its accuracy on new data."""
    rng = np.random.default_rng(seed)
    x, y = data(rng, 500)
    ends = np.cumsum(np.array(PROPORTIONS) * len(x)).astype(int)  # chunk k is ends[k - 2] .. ends[k - 1]
    network = Network(rng)
    for _ in range(steps):
        k = 1 + rng.choice(COUNT, p=PROPORTIONS)
        chosen = rng.choice(ends[k - 1], batch)  # of chunks 1..k
        grads, _ = network.gradients(x[chosen], y[chosen], k, rng)
        for layer, grad in zip(network.layers, grads, strict=True):
            layer.step(grad, k, lr=2e-3)
        if learns_psi:
            k = int(rng.integers(2, COUNT + 1))
            chosen = rng.integers(ends[k - 2], ends[k - 1], batch)  # of chunk k, for subnetwork k - 1
            _, grad = network.gradients(x[chosen], y[chosen], k - 1, rng)
            network.psi_steps += 1
            pkn.adam_step(
                network.psi, grad.astype(np.float32), *network.psi_moments, None, None, step=network.psi_steps, lr=1e-2
            )
    return network, network.accuracy(*data(rng, 5000))


def main() -> None:
    _, without = train(learns_psi=False)
    network, accuracy = train(learns_psi=True)
    probabilities = network.probabilities()
    useful, noise = probabilities[:USEFUL].mean(), probabilities[USEFUL:].mean()
    print(f"kernels: {pkn.instruction_set()}, {pkn.threads()} threads")
    print(f"an input that tells the classes is kept with probability {useful:.2f}, one of noise with {noise:.2f}")
    print(f"accuracy {100 * accuracy:.1f} %; where the mask does not learn {100 * without:.1f} %")


if __name__ == "__main__":
    main()
