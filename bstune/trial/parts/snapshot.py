"""Takes a trial's state at its last step, so that another trial can go on from there."""

from collections.abc import Mapping

from torch import Tensor

from bstune.core.records import TrialProtocol, TrialSpec
from bstune.trial.devices.device import device_name
from bstune.trial.devices.randomness import GeneratorStates
from bstune.trial.lightning.installed import LightningModule, Trainer
from bstune.trial.parts.accumulated import accumulated_metrics
from bstune.trial.parts.cadence import Cadence
from bstune.trial.parts.checkpoint import StateWriter, StoppedState
from bstune.trial.parts.state import TrialState


class Snapshot:
    """Keeps a trial's training state, if asked to, just before the evaluation at its last step.

    Args:
        spec: of the trial.
        protocol: of all trials; names the device, which is noted in the state.
        versions: of the packages, noted there too. A trial goes on only from a state of its own
            device and versions.

    Attributes:
        writer: writes the state when the evaluation starts; None: no state is asked for.
    """

    def __init__(
        self, spec: TrialSpec, protocol: TrialProtocol, versions: Mapping[str, str]
    ) -> None:
        self._spec = spec
        self._protocol = protocol
        self._versions = versions
        self.writer: StateWriter | None = None

    def prepare_if_last_step_is_next(self, state: TrialState) -> None:
        """Let the stream of batches remember its position if the next step is the last one."""
        if self.writer is not None:
            self.writer.prepare(last=state.steps + 1 >= state.last_step)

    def take(
        self,
        state: TrialState,
        cadence: Cadence,
        start_gap: float | None,
        generators: GeneratorStates,
        trainer: Trainer,
        module: LightningModule,
        has_epochs: bool,
    ) -> None:
        """Take the state of a trial that is out of steps and has not ended otherwise.

        Nothing is taken of any other trial, or where no state is asked for.

        Args:
            state: of the trial.
            cadence: of its evaluations.
            start_gap: how far it was from the target before training; None if that was not
                measured.
            generators: states of the random number generators after the last step.
            trainer: whose logged metrics are kept, on the CPU.
            module: whose frozen parameters are named.
            has_epochs: whether the trial's epochs end, so that an epoch's accumulated metrics are
                kept as well.
        """
        is_out_of_steps = state.steps >= state.last_step and state.status == "stopped"
        if self.writer is None or not is_out_of_steps:
            return
        metrics = dict[str, Tensor]()
        for name, value in trainer.callback_metrics.items():
            metrics[name] = value.detach().cpu().clone()
        frozen = list[str]()
        for name, parameter in module.named_parameters():
            if not parameter.requires_grad:
                frozen.append(name)
        self.writer.take(
            StoppedState(
                number=self._spec.number,
                batch_size=self._spec.batch_size,
                lr=self._spec.lr,
                seed=self._spec.seed,
                steps=state.steps,
                skipped=state.skipped,
                start_gap=start_gap,
                # These three tell when the trial that goes on is to be evaluated.
                near=cadence.near,
                due_step=cadence.due_step,
                forced=cadence.forced,
                metrics=metrics,
                # The values that an epoch has logged so far.
                epoch=accumulated_metrics(trainer, module) if has_epochs else {},
                # A step that a gradient scaler skips has taken a batch as well.
                stream=self.writer.position(state.steps + state.skipped),
                generators=generators,
                frozen=tuple(frozen),
                device=device_name(self._protocol.trainer, self._protocol.devices),
                versions=dict(self._versions),
            )
        )
