"""Runs short trials of a workload, each with a recorder."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from bstune.core.evaluation_schedule import AT_THE_END
from bstune.core.records import TrialProtocol, TrialSpec
from bstune.system.watchdog import waiting_for
from bstune.trial.batches.loader import loaders_of
from bstune.trial.checks.recorder import SHORT_PLAN, Recorder, RecordingPlan
from bstune.trial.checks.short_trial import ShortTrial
from bstune.trial.checks.small_evaluations import small_evaluations
from bstune.trial.devices.device import device_of
from bstune.trial.lightning.installed import sized_len
from bstune.trial.lightning.trainer import without_recording_or_stopping
from bstune.trial.loop import Workload, run_trial
from bstune.trial.parts.checkpoint import Stopped
from bstune.trial.parts.verdict import refuse_met_target


class ShortRuns:
    """Runs short trials of a workload through the same code as every other trial.

    Args:
        workload: what is trained.
        protocol: of the study's trials; short ones have one evaluation, at the end, and measure no
            noise scale.

    Attributes:
        on_cpu: whether trials run on a CPU, where equal trainings have equal results to the bit.
            Elsewhere kernels may round in another way.
        evaluation_batches: in which an evaluation reads all of the validation data; 0: unknown.
    """

    def __init__(self, workload: Workload, protocol: TrialProtocol) -> None:
        self._workload = workload
        # No target ends a short trial, but untrained weights are compared with it.
        self._target = protocol.target
        self._protocol = replace(
            protocol.for_steps_only(),
            # Two trials are compared, which further evaluations could make differ.
            evaluation_schedule=AT_THE_END,
            noise_scale_every=None,
            # The user's call-backs that stop a training early or save it are left out.
            trainer=without_recording_or_stopping(protocol.trainer),
        )
        self.on_cpu = device_of(protocol.trainer).type == "cpu"
        loaders = loaders_of(workload.validation_batches)
        self.evaluation_batches = sum(sized_len(loader) or 0 for loader in loaders)
        self._evaluated = small_evaluations(
            workload.validation_batches, workload.validation_examples
        )

    def evaluation_seconds(self, trial: ShortTrial) -> float:
        """Predict the seconds of an evaluation on all of the data from those of a short trial.

        An evaluation of a short trial takes ``few_share`` of the data.
        """
        evaluations = max(1, len(trial.result.history))
        return trial.result.eval_seconds / evaluations / self._evaluated.few_share

    def run_from_start(self, spec: TrialSpec) -> ShortTrial:
        """Run a trial with an evaluation of its untrained weights.

        A ConfigError says that they meet the target.
        """
        trial = self._run(spec, self._protocol, self._evaluated.start)
        is_met = trial.start_metric is not None and self._target.reached(trial.start_metric)
        if is_met and self._evaluated.start_is_part:
            # On a part of the data they may meet it by chance, so all of the data decide.
            trial = self._run(spec, self._protocol, self._workload.validation_batches)
        if trial.start_metric is not None:
            refuse_met_target(self._target, trial.start_metric)
        return trial

    def run(
        self,
        spec: TrialSpec,
        plan: RecordingPlan = SHORT_PLAN,
        *,
        state: Path | None = None,
        resume: Stopped | None = None,
    ) -> ShortTrial:
        """Run a trial that is evaluated on a few batches at its end.

        Args:
            spec: of the trial.
            plan: when it ends, and which of its steps are recorded.
            state: the file that gets the state of a stopped trial; None: it is not kept.
            resume: the stopped trial from which this one goes on; None: it starts afresh.
        """
        # Untrained weights are evaluated in run_from_start() alone.
        limits = {"limit_val_batches": self._evaluated.few, "num_sanity_val_steps": 0}
        protocol = replace(self._protocol, trainer={**self._protocol.trainer, **limits})
        return self._run(spec, protocol, self._evaluated.batches, plan, state, resume)

    def _run(
        self,
        spec: TrialSpec,
        protocol: TrialProtocol,
        validation_batches: Iterable[Any],
        plan: RecordingPlan = SHORT_PLAN,
        state: Path | None = None,
        resume: Stopped | None = None,
    ) -> ShortTrial:
        """Run a trial that is evaluated on ``validation_batches``, and record what it does.

        The other arguments are those of :meth:`run`, with the protocol that the trial follows.
        """
        build = self._workload.build_module
        with waiting_for("the preflight", steps=True) as wait:
            recorder = Recorder(spec, self._target.metric, plan, wait, exact=self.on_cpu)
            workload = replace(
                self._workload,
                build_module=lambda trial: recorder.attach(build(trial)),
                validation_batches=validation_batches,
            )
            result = run_trial(workload, spec, protocol, state_file=state, resume=resume)
        return recorder.seen(result)
