"""How long a study may take on this machine, and what would make it fit, said before anything long begins."""

from bstune.system.console import format_seconds, plural

LONG_SECONDS = 3600.0  # from here on a study is said to be long
# Of a search: fewer show too little, so that a limit of time is the better advice.
FEWEST_TRIALS = 10


def trials_that_fit(seconds: float, trials: int) -> int | None:
    """Say how many of a search's trials end within an hour, none reaching the target.

    ``seconds`` are those of all ``trials``. None: so few that fewer trials are no advice.
    """
    fitting = int(trials * LONG_SECONDS / seconds)
    return fitting if FEWEST_TRIALS <= fitting < trials else None


def advice_on_time(seconds: float, trials: int, device: str, limited: bool) -> str | None:
    """Say what a long study takes and what would make it fit; None for one that is not long.

    Args:
        seconds: of all trials, none reaching the target.
        trials: of the search.
        device: that trains, as torch names it.
        limited: whether the search's time has a limit already.
    """
    if limited or seconds <= LONG_SECONDS:
        return None
    fitting = trials_that_fit(seconds, trials)
    ways = [] if fitting is None else [f"fewer trials (search.trials={fitting})"]
    ways.append("search.wall_seconds=3600, which ends it after an hour with what it knows")
    if device.startswith("cpu"):
        ways.append("a GPU")
    each = format_seconds(seconds / trials)
    return (
        f"a study takes up to {format_seconds(seconds)} here: {plural(trials, 'trial')} of up to "
        f"{each}, if none reached the target; to make it fit: {', or '.join(ways)}. It goes on"
    )
