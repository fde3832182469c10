"""Progress of training on a terminal: steps, losses and the time left, and each hyperparameter below."""

from __future__ import annotations

import sys

from tqdm import tqdm

from partnets.training.history import History

BAR = "{n_fmt}/{total_fmt} steps |{bar:20}| {elapsed}, {remaining} left{postfix}"


class Progress:
    """Two lines on standard error during training, if it is a terminal and `shown` is True.

    Example:
        >>> with Progress(done=0, steps=10) as progress:
        ...     progress.update(History())
    """

    def __init__(self, done: int, steps: int, *, shown: bool = True) -> None:
        disable = None if shown else True  # None disables the bar if there is no terminal
        self.bar = tqdm(total=done + steps, initial=done, disable=disable, bar_format=BAR)
        self.values = tqdm(position=1, disable=disable, bar_format="{desc}", leave=False)

    def update(self, history: History) -> None:
        """Show one more step and the latest values of a history."""
        if self.bar.disable:
            return
        latest = {"loss": history.steps["loss"][-1:], "L_ML": history.lml["lml"][-1:]}
        self.bar.set_postfix_str(_joined(latest), refresh=False)
        short = {name.rpartition(".")[2]: values for name, values in history.values.items()}
        are_unique = len(short) == len(history.values)
        self.values.set_description_str(_joined(short if are_unique else history.values), refresh=False)
        if self.bar.update():  # true if the bar was printed
            self.values.refresh()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_) -> None:
        if self.bar.disable:
            return
        self.values.close()
        self.bar.refresh()
        self.bar.close()
        if self.values.desc:  # tqdm cannot keep a second line
            print(self.values.desc, file=sys.stderr)


def _joined(columns: dict[str, list]) -> str:
    return ", ".join(f"{name} {column[-1]:.3g}" for name, column in columns.items() if column)
