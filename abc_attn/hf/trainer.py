"""transformers' Trainer and Seq2SeqTrainer, where resuming a run that is finished changes nothing."""

from __future__ import annotations

from typing import Any

import transformers


class _StaysFinished:
    """Mixed into a trainer. transformers looks at max_steps after a step alone: a finished run would do one more."""

    def _run_epoch(self, *arguments: Any, **given: Any) -> None:
        state, control = self.state, self.control  # type: ignore[attr-defined]
        if state.global_step >= state.max_steps:
            control.should_training_stop = True
            return
        super()._run_epoch(*arguments, **given)  # type: ignore[misc]


class Trainer(_StaysFinished, transformers.Trainer):
    """transformers.Trainer, where resuming a run that is finished changes nothing."""


class Seq2SeqTrainer(_StaysFinished, transformers.Seq2SeqTrainer):
    """transformers.Seq2SeqTrainer, where resuming a run that is finished changes nothing."""
