"""What goes with the batch size of a trial's present step, where it changes while training.

The batches come from the data by the trial's plan. What follows them is here: how many micro-batches Lightning
accumulates, how long an epoch is, the learning rate, and which batch size the seconds of a segment belong to.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from torch.optim import Optimizer

from bstune.core.batch_schedule import BatchPlan
from bstune.core.clock import seconds_per_step
from bstune.core.errors import ConfigError
from bstune.core.records import timed
from bstune.core.step_time import fit_line
from bstune.trial.batches import MicroBatches, StreamBatchSampler, micro_batch_sizes


class BatchSizes:
    """The batch sizes of one trial, and which of them its present step has.

    Args:
        plan: of the whole trial.
        micro_batch_size: larger batches are accumulated from micro-batches of this many examples; None: never.
        batches: that the trial has trained on before, as one that goes on has.
    """

    def __init__(self, plan: BatchPlan, micro_batch_size: int | None, batches: int) -> None:
        self.plan, self._micro_batch_size = plan, micro_batch_size
        self._enter_part(plan.part(batches))
        self.micro = MicroBatches(plan.sizes[self._part], micro_batch_size)
        self._timed: list[int] = []  # batch sizes of the clock's segments
        self._rates: dict[
            Optimizer, list[Any]
        ] = {}  # before the present step, of its groups of parameters

    @property
    def accumulates(self) -> bool:
        """Whether any of the batches is accumulated from micro-batches."""
        return any(
            len(micro_batch_sizes(size, self._micro_batch_size)) > 1 for size in self.plan.sizes
        )

    def epochs(self, batches: Iterable[Any], steps: int) -> int:
        """Return the epochs that so many steps take, of batches with epochs."""
        sampler = getattr(batches, "batch_sampler", None)
        return sampler.epochs(steps) if isinstance(sampler, StreamBatchSampler) else steps

    def start(self, trainer: Any) -> None:
        """Let a Trainer that is about to train, or to go on, accumulate and step as the batch sizes ask for."""
        if not self.plan.changes:
            return
        self._accumulate(trainer, trainer.fit_loop.batch_idx + 1)
        if any(factor != 1.0 for factor in self.plan.lr_factors):
            for optimizer in trainer.optimizers:
                if not isinstance(optimizer, Optimizer):
                    raise ConfigError(
                        f"batch_schedule.lr_exponent: {type(optimizer).__name__} is no torch optimizer, whose learning "
                        "rate could follow the batch size: set batch_schedule.lr_exponent=0"
                    )
                # Around each step, so that schedules and the module find the rate that they have set.
                optimizer.register_step_pre_hook(self._raise_rates)
                optimizer.register_step_post_hook(self._restore_rates)

    def start_epoch(self, trainer: Any) -> None:
        """Let the Trainer know how long the epoch is that begins, after the first one of its fit."""
        sampler = getattr(trainer.train_dataloader, "batch_sampler", None)
        if self.plan.changes and isinstance(sampler, StreamBatchSampler):
            # In micro-batches it may be longer than the first one, past which the loader would not be read.
            trainer.fit_loop.max_batches = trainer.fit_loop._combined_loader.limits = (
                sampler.next_length
            )

    def start_micro_batches(self, trainer: Any) -> None:
        """Count micro-batches anew, as an epoch begins."""
        if self.plan.changes:
            self._accumulate(trainer, 0)

    def change(self, trainer: Any, batches: int, micro_batch: int) -> None:
        """Go on to the part that the next batch is in, which begins with this micro-batch of the epoch."""
        self._enter_part(self.plan.part(batches))
        self._accumulate(trainer, micro_batch)

    def note_segment(self, steps: int) -> None:
        """Note that the clock has ended a segment of ``steps`` steps of the present size."""
        if steps > 0:
            self._timed.append(self.plan.sizes[self._part])

    def timed(
        self, segments: Sequence[tuple[int, float]], steps: int, warmup_steps: int
    ) -> dict[str, Any]:
        """Return a record's ``seconds_per_step``, and its ``batch_parts`` where B changes, of the trial's ``steps``.

        A size whose steps a trial that goes on did not time itself is on the line through the others.
        """
        if not self.plan.changes:
            return {"seconds_per_step": seconds_per_step(segments, warmup_steps)}
        counts, taus = self.plan.counts(steps), dict[int, float]()
        for size, _ in counts:
            own = [
                segment for segment, of in zip(segments, self._timed, strict=False) if of == size
            ]
            tau = seconds_per_step(own, warmup_steps)
            if tau is not None:
                taus[size] = tau
        missing = taus and len(taus) < len(counts)
        line = fit_line(list(taus.items())) if missing else lambda size: None
        return timed([(size, count, taus.get(size, line(size))) for size, count in counts])

    def _enter_part(self, part: int) -> None:
        self._part = part
        following = self.plan.first[part + 1 :]
        self.end = (
            following[0] if following else None
        )  # the number of batches after which their size changes

    def _accumulate(self, trainer: Any, micro_batch: int) -> None:
        self.micro = MicroBatches(self.plan.sizes[self._part], self._micro_batch_size, micro_batch)
        trainer.accumulate_grad_batches = self.micro

    def _raise_rates(
        self, optimizer: Optimizer, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        """Raise the rates before a step, but not while its closure runs: that has the module's ``training_step``."""
        own = options.get("closure") or next(iter(arguments[1:]), None)
        self._multiply_rates(optimizer)
        if not callable(own):
            return None

        def closure() -> Any:
            self._restore_rates(optimizer)
            loss = own()
            self._multiply_rates(optimizer)
            return loss

        if "closure" in options:
            return arguments, {**options, "closure": closure}
        return (arguments[0], closure, *arguments[2:]), options

    def _multiply_rates(self, optimizer: Optimizer) -> None:
        factor = self.plan.lr_factors[self._part]
        self._rates[optimizer] = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * factor

    def _restore_rates(self, optimizer: Optimizer, *arguments: Any) -> None:
        for group, rate in zip(optimizer.param_groups, self._rates[optimizer], strict=True):
            group["lr"] = rate
