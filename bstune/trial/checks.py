"""What a preflight tells; read without torch."""

from bstune.core.records import Frozen

# A schedule whose end comes after so many times its moves was meant for more of them.
UNMOVED = 1.5


class Schedule(Frozen):
    """How a schedule moves in a trial at the baseline."""

    name: str
    """Of its class."""
    interval: str
    """``step`` or ``epoch``: when Lightning calls its ``step``."""
    steps: int
    """Of the trial."""
    moves: int
    """Calls of its ``step`` in these."""
    rate: float
    """The highest rate, over ``trial.lr``."""
    follows: bool
    """Whether the trial's length decides it."""
    end: int | None
    """The move at which it raises, comes to zero or begins again; None: it does not."""

    @property
    def is_unmoved(self) -> bool:
        """Whether it was meant for more moves than the trial makes: the length is in steps."""
        end = self.end or 0
        return self.follows and self.interval == "epoch" and end > UNMOVED * (self.moves + 1)

    @property
    def state(self) -> str:
        """How it moves, in words."""
        return (
            f"{self.name} moves {self.moves} times in {self.steps:,} steps, once an epoch, at a "
            f"rate {1.0 / self.rate:.3g} times under lr"
        )

    @property
    def remedy(self) -> str:
        """What lets one that is unmoved move with each step."""
        return 'return [optimizer], [{"scheduler": schedule, "interval": "step"}]'


class Checks(Frozen):
    """What a preflight saw; what makes a study impossible was raised."""

    resumes: bool
    """Whether a resumed trial equals one that was never stopped."""
    is_sum: bool
    """Whether the training loss is a sum over the batch, by which an SGD's steps grow."""
    schedules: tuple[Schedule, ...]
    lines: tuple[str, ...]
    """What has to be said."""
