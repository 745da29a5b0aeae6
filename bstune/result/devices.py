"""Plans for several devices."""

from bstune.result.values import BatchSize, Items, NotNegative, Part, Positive


class DevicePlan(Part, frozen=True):
    """The best that a number of devices can do.

    Seconds' interval is from the curve's band alone.
    """

    devices: BatchSize
    """How many share each batch."""
    device_batch_size: BatchSize
    """Examples of a step on each."""
    batch_size: BatchSize
    """Examples of a step on all."""
    lr: Positive
    """The learning rate."""
    steps: NotNegative
    """Steps to the target."""
    seconds_per_step: NotNegative
    """Seconds, with the all-reduce."""
    seconds: NotNegative
    """Seconds of training to the target."""
    seconds_low: NotNegative
    """Lower end of their interval."""
    seconds_high: NotNegative
    """Upper end of their interval."""
    device_seconds: NotNegative
    """Seconds times devices."""
    speed_up: NotNegative
    """The best time of one device over the time."""
    efficiency: NotNegative
    """Speed-up over devices."""


class DevicePlans(Part, frozen=True):
    """Plans for several devices, each as fast as this one."""

    ideal: Items[DevicePlan] = ()
    """Without an all-reduce."""
    with_all_reduce: Items[DevicePlan] = ()
    """Empty where the config states no all-reduce."""

    @property
    def told(self) -> tuple[DevicePlan, ...]:
        """The plan to tell: with the all-reduce, where it is known."""
        return self.with_all_reduce or self.ideal
