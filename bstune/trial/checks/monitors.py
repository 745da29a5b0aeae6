"""Call-backs of the user's that stop a training early or save it, and the plan's note on them."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from bstune.system.console import listing
from bstune.trial.lightning.packages import of_package, package_of


@dataclass(frozen=True)
class Monitors:
    """The call-backs that stop a training early or save it, by their classes' names."""

    stopping: tuple[str, ...] = ()
    # Those that save without a folder of the user's.
    saving: tuple[str, ...] = ()
    # Those that save into a folder of the user's, each with the folder.
    saving_to: tuple[tuple[str, str], ...] = ()

    def __add__(self, other: "Monitors") -> "Monitors":
        """Join the call-backs of both."""
        return Monitors(
            self.stopping + other.stopping,
            self.saving + other.saving,
            self.saving_to + other.saving_to,
        )

    def note(self, *, target_is_open: bool, has_epochs: bool) -> str | None:
        """Say in the plan how they act in trials; None where there are none.

        Args:
            target_is_open: whether there is no target that ends trials, or none yet.
            has_epochs: whether the training batches have epochs that end.
        """
        parts = list[str]()
        if self.stopping and target_is_open:
            counted = "the ends of epochs" if has_epochs else "bstune's evaluations"
            parts.append(
                f"{_names(self.stopping)} ends trials that no target ends, and counts {counted} "
                "there, not those of val_check_interval"
            )
        elif self.stopping:
            parts.append(
                f"{_names(self.stopping)} ends no trial: bstune does, at the target or at the "
                "trial's last step"
            )
        if self.saving:
            parts.append(f"the files of {_names(self.saving)} go with their trial")
        for name, folder in self.saving_to:
            parts.append(f"{name} saves all trials to {folder}")
        return "; ".join(parts) or None


def monitors_of(callbacks: Iterable[Any]) -> Monitors:
    """Find the call-backs that stop a training early or save it, before a Trainer sets them up."""
    stopping = list[str]()
    saving = list[str]()
    saving_to = list[tuple[str, str]]()
    for callback in callbacks:
        package = package_of(callback)
        name = type(callback).__name__
        if isinstance(callback, of_package(package, "callbacks.EarlyStopping")):
            stopping.append(name)
        elif isinstance(callback, of_package(package, "callbacks.ModelCheckpoint")):
            if callback.dirpath is None:
                saving.append(name)
            else:
                saving_to.append((name, str(callback.dirpath)))
    return Monitors(tuple(stopping), tuple(saving), tuple(saving_to))


def _names(names: tuple[str, ...]) -> str:
    """List names in words, each once."""
    return listing(list(dict.fromkeys(names)))
