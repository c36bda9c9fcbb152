"""Hydra callbacks. Hydra imports them before it has looked at every job of a multirun: nothing heavy at the top."""

from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig


class SweepReport(Callback):
    """Ends a multirun in one table and one figure of the records that its jobs made."""

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """See `windowquant.harness.sweep.report`."""
        from windowquant.harness.sweep import report

        report(config)
