"""HyperRNN, HyperLSTM and HyperGRU: torch's recurrent layers as best responses, by the products of HyperLinear."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from partnets.stn.layer import HyperLayer
from partnets.stn.products import MATMUL
from partnets.stn.vector import HyperVector, is_each

# The state of a layer: (h,), or (h, c) for an LSTM.
State = tuple[Tensor, ...]


class _HyperRecurrent(HyperLayer):
    """The base of HyperRNN, HyperLSTM and HyperGRU.

    torch's layers keep their parameters in one list, `_flat_weights`, which is made for each call here.

    One λ for all examples uses torch's kernel with merged weights. A λ for each example uses a loop over time steps,
    with one product for the inputs of all steps and two products for the hidden state at each step.
    """

    drops = "weight_hh"

    @property
    def responding(self) -> tuple[str, ...]:
        return tuple(self._flat_weights_names)

    @classmethod
    def named_by(cls, layer: nn.Module) -> tuple[str, ...]:
        return tuple(layer._flat_weights_names)

    def begin_response(self, vector: HyperVector) -> None:
        super().begin_response(vector)
        # These keep torch's parameters alive.
        vars(self).pop("_flat_weights", None)
        self._flat_weight_refs = []

    def end_response(self, hyper: Tensor) -> None:
        super().end_response(hyper)
        self._init_flat_weights()

    @property
    def _flat_weights(self) -> list[Tensor]:
        return [self.merged(name, self.vector.input()) for name in self.names()]

    @_flat_weights.setter
    def _flat_weights(self, values) -> None:
        pass

    def __setattr__(self, name: str, value: Any) -> None:
        nn.Module.__setattr__(self, name, value)  # without torch's update of its list

    def _init_flat_weights(self) -> None:
        self._flat_weight_refs = []

    def _update_flat_weights(self) -> None:
        """Do nothing: the list is made for each call."""

    flatten_parameters = _update_flat_weights

    def forward(
        self, input: Tensor | PackedSequence, hx: Tensor | State | None = None
    ) -> tuple[Tensor | PackedSequence, Tensor | State]:
        hyper = self.vector.input()
        if not is_each(hyper):
            return super().forward(input, hx)
        if isinstance(input, PackedSequence):
            raise ValueError(
                "the sequences are packed, but each example has its own hyperparameters; pass padded sequences, or"
                " per_example=False to stn.convert."
            )
        if input.dim() != 3:
            raise ValueError(f"the input is {list(input.shape)}; pass a batch of sequences.")
        self.hyper_of(input, -1, 0 if self.batch_first else 1)
        x = input if self.batch_first else input.transpose(0, 1)
        states = self._states(x, hx)
        last = []
        for layer in range(self.num_layers):
            outputs = []
            for direction in range(2 if self.bidirectional else 1):
                suffix = f"_l{layer}" + ("_reverse" if direction else "")
                y, state = self._pass(x, hyper, suffix, next(states), bool(direction))
                outputs.append(y)
                last.append(state)
            x = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
            if self.dropout and self.training and layer + 1 < self.num_layers:
                x = F.dropout(x, self.dropout)
        hidden = tuple(torch.stack(parts) for parts in zip(*last, strict=True))
        return x if self.batch_first else x.transpose(0, 1), hidden if len(hidden) > 1 else hidden[0]

    def _states(self, x: Tensor, hx) -> Iterator[State]:
        """Return the initial states of all layers and directions."""
        count, sizes = self.num_layers * (2 if self.bidirectional else 1), self.state_sizes()
        if hx is None:
            hx = tuple(x.new_zeros(count, len(x), size) for size in sizes)
        hx = hx if isinstance(hx, tuple) else (hx,)
        expected = [[count, len(x), size] for size in sizes]
        if [list(part.shape) for part in hx] != expected:
            raise ValueError(f"hx is {[list(part.shape) for part in hx]}; pass {expected}.")
        return zip(*(part.unbind() for part in hx), strict=True)

    def state_sizes(self) -> tuple[int, ...]:
        return (self.hidden_size,)

    def _pass(self, x: Tensor, hyper: Tensor, suffix: str, state: State, reverse: bool) -> tuple[Tensor, State]:
        """Return the outputs of a layer in one direction, [batch, length, ...], and its last state."""

        def affine(weight: str, bias: str | None) -> Callable[[Tensor], Tensor]:
            return self.affine(hyper, MATMUL, f"weight_{weight}{suffix}", bias and f"bias_{bias}{suffix}")

        of_input, of_state = (affine(each, each if self.bias else None) for each in ("ih", "hh"))
        project = affine("hr", None) if self.proj_size else None
        from_input = of_input(x).unbind(1)
        outputs = []
        for gates in reversed(from_input) if reverse else from_input:
            state = self.cell(gates, of_state(state[0]), state)
            if project is not None:
                state = project(state[0]), *state[1:]
            outputs.append(state[0])
        return torch.stack(outputs[::-1] if reverse else outputs, 1), state

    def cell(self, from_input: Tensor, from_state: Tensor, state: State) -> State:
        """Return the next state, from the input's and the previous state's terms of the gates."""
        raise NotImplementedError


class HyperRNN(_HyperRecurrent, nn.RNN):
    """A best response in place of torch.nn.RNN."""

    def cell(self, from_input: Tensor, from_state: Tensor, state: State) -> State:
        return ((from_input + from_state).tanh() if self.mode == "RNN_TANH" else (from_input + from_state).relu(),)


class HyperLSTM(_HyperRecurrent, nn.LSTM):
    """A best response in place of torch.nn.LSTM."""

    def state_sizes(self) -> tuple[int, ...]:
        return self.proj_size or self.hidden_size, self.hidden_size

    def cell(self, from_input: Tensor, from_state: Tensor, state: State) -> State:
        entry, forget, new, out = (from_input + from_state).chunk(4, -1)
        cell = forget.sigmoid() * state[1] + entry.sigmoid() * new.tanh()
        return out.sigmoid() * cell.tanh(), cell


class HyperGRU(_HyperRecurrent, nn.GRU):
    """A best response in place of torch.nn.GRU."""

    def cell(self, from_input: Tensor, from_state: Tensor, state: State) -> State:
        reset, update, new = from_input.chunk(3, -1)
        state_reset, state_update, state_new = from_state.chunk(3, -1)
        update = (update + state_update).sigmoid()
        new = (new + (reset + state_reset).sigmoid() * state_new).tanh()
        return (new + update * (state[0] - new),)
