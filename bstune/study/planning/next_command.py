"""The wall time that lets the command that continues a study run its first two trials.

The command starts anew: it imports, reads the data, and may survey the hardware once more. All that
comes on top of what the study has taken, so that the advice is more than that and a little.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

# The next start may take so many times as long as this one. Without their surveys, three starts of
# one study on a busy machine took 79 to 177 s.
START_SLACK = 1.5


@dataclass(frozen=True)
class NextCommand:
    """What the next command of a study has to have time for.

    Its functions take a limit, ``search.wall_seconds``, as what is kept and allowed is a share of
    it. Together these shares are less than 1.
    """

    charged: float
    """Seconds of the limit that are spent before the command begins."""
    start: float
    """Seconds from its begin to its first decision, without a survey, as this command had them."""
    survey: Callable[[float, float], float]
    """Gives the seconds of a survey at most, by the limit and what is left when it begins."""
    trials: int
    """Points that have to be run before there are two."""
    decision: float
    """Seconds of the decision on a trial."""
    trial: Callable[[float], float]
    """Gives the wall seconds of a trial, by the limit."""
    kept: Callable[[float], float]
    """Gives the seconds that are kept for what follows the search, by the limit."""
    report: float
    """Seconds of the report."""

    def seconds(self, limit: float) -> float:
        """Give the wall seconds that ``search.wall_seconds=limit`` would have to cover.

        They depend on the limit itself, as survey, trials and what is kept get shares of it.
        """
        started = self.charged + START_SLACK * self.start
        surveyed = started + self.survey(limit, limit - started)
        trials = self.trials * (self.decision + self.trial(limit))
        return surveyed + trials + self.kept(limit) + self.report

    def least_limit(self, above: float) -> int:
        """Give the least whole limit above a given one that covers its own seconds."""
        limit = math.floor(above) + 1
        # It rises to the fixed point, and comes to it as the shares of a limit are less than 1.
        while self.seconds(limit) > limit:
            limit = math.ceil(self.seconds(limit))
        return limit
