"""Plans for several devices."""

from bstune.result.values import BatchSize, NotNegative, Part, Positive


class DevicePlan(Part, frozen=True):
    """The fastest way to the target that is predicted for a number of devices.

    Each device is as fast as the one that the study ran on. The interval of the seconds holds the
    error of S*(B) alone.
    """

    devices: BatchSize
    """How many devices share each batch."""
    device_batch_size: BatchSize
    """Examples of a step on each device."""
    batch_size: BatchSize
    """Examples of a step on all devices."""
    lr: Positive
    """The learning rate."""
    steps: NotNegative
    """Steps to the target."""
    seconds_per_step: NotNegative
    """Seconds of a step, communication not counted."""
    seconds: NotNegative
    """Seconds of training to the target."""
    seconds_low: NotNegative
    """Lower end of the interval of ``seconds``."""
    seconds_high: NotNegative
    """Upper end of the interval of ``seconds``."""
    device_seconds: NotNegative
    """``seconds`` times the number of devices."""
    speed_up: NotNegative
    """The best seconds of one device over ``seconds``."""
    efficiency: NotNegative
    """``speed_up`` over the number of devices."""
