"""Progress of training on a terminal or in a notebook: steps, the time left, losses and each hyperparameter."""

from __future__ import annotations

from tqdm.auto import tqdm

from partnets.training.history import History

BAR = "{n_fmt}/{total_fmt} steps |{bar}| {elapsed}, {remaining} left{postfix}"


class Progress(tqdm):
    """A line on standard error if it is a terminal, or a widget in a notebook with ipywidgets, if `shown` is True.

    Example:
        >>> with Progress(done=0, steps=10) as progress:
        ...     progress.show(History())
    """

    def __init__(self, done: int, steps: int, *, shown: bool = True) -> None:
        disable = None if shown else True  # None disables the bar if there is no terminal
        super().__init__(total=done + steps, initial=done, disable=disable, bar_format=BAR)

    def show(self, history: History) -> None:
        """Advance the bar by one step; show the history's latest loss, L_ML and hyperparameters."""
        if self.disable:
            return
        latest = {"loss": history.steps["loss"], "L_ML": history.lml["lml"]}
        short = {name.rpartition(".")[2]: values for name, values in history.values.items()}
        latest |= short if len(short) == len(history.values) else history.values
        text = ", ".join(f"{name} {column[-1]:.3g}" for name, column in latest.items() if column)
        self.set_postfix_str(text, refresh=False)
        self.update()
