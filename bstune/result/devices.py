"""Plans for several devices."""

from bstune.result.values import BatchSize, Items, NotNegative, Part, Positive


class DevicePlan(Part, frozen=True):
    """The fastest way to the target that is predicted for a number of devices.

    The interval of the seconds holds the error of S*(B) alone.
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
    """Seconds of a step, the all-reduce included."""
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


class DevicePlans(Part, frozen=True):
    """Plans for several devices, each as fast as the one that the study ran on."""

    ideal: Items[DevicePlan] = ()
    """Plans that count no time for an all-reduce."""
    with_all_reduce: Items[DevicePlan] = ()
    """Plans that count the all-reduce. Empty where the config states none."""

    @property
    def to_show(self) -> tuple[DevicePlan, ...]:
        """The plans that reports show: those with the all-reduce, where the config states one."""
        return self.with_all_reduce or self.ideal
