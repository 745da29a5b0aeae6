"""The roofline of a training step: what the machine's arithmetic and memory allow.

Williams et al. 2009: attainable FLOP/s = min(peak FLOP/s, bytes/s x intensity), which meet at the
ridge. Both limits are measured on the machine, by matrix products in the trials' precision and by
copies, so that a share of them is none of the vendor's figure. FLOPs are those that
``torch.utils.flop_counter`` finds in products, convolutions and attention. Bytes are those of the
tensors that each operation reads and writes, as if nothing stayed in a cache in between; what
``torch.compile`` fuses moves less.
"""

from collections.abc import Iterator, Sequence

from bstune.core.records import Frozen
from bstune.system.console import number

# A step that takes so many times what the roofline allows is bound by neither of its limits.
FAR_FROM_ROOFLINE = 10.0
# Tensor cores take 16-bit numbers in multiples of 16 bytes (NVIDIA, Matrix Multiplication
# Background, table 1).
TENSOR_CORE_MULTIPLE = 8
# Layers with less of the weights are not worth padding.
LEAST_SHARE = 0.05
# Layers that are named at most.
LAYERS_NAMED = 3


class Line(Frozen):
    """A cost over batch size: constant + per_example B."""

    constant: float
    per_example: float

    def __call__(self, batch_size: float) -> float:
        """The cost at a batch size."""
        return self.constant + self.per_example * batch_size

    @staticmethod
    def through(first: tuple[float, float], second: tuple[float, float]) -> "Line":
        """The line through two points (batch size, cost).

        Through 0 and the second one if they are of one size, or if the cost would begin below 0.
        """
        (small, low), (large, high) = first, second
        slope = (high - low) / (large - small) if large != small else high / large
        if low - slope * small < 0.0:
            return Line(constant=0.0, per_example=high / large)
        return Line(constant=low - slope * small, per_example=slope)


class Padding(Frozen):
    """A dimension of a layer that misses the tensor cores' multiple."""

    layer: str
    dimension: str
    size: int

    @property
    def padded(self) -> int:
        """The next size that does not."""
        return -(-self.size // TENSOR_CORE_MULTIPLE) * TENSOR_CORE_MULTIPLE


class Roofline(Frozen):
    """A training step's cost, and the machine's limits."""

    flops: Line
    """Of a step, forward, backward and update."""
    bytes: Line
    """That a step moves."""
    peak: float
    """FLOP/s of the best matrix product."""
    bandwidth: float
    """Bytes/s of the best copy, each byte read and written."""
    precision: str
    """In which steps compute, as Lightning's Trainer names it."""
    on_tensor_cores: bool = False
    """Whether it is in 16 bits on CUDA."""
    paddings: tuple[Padding, ...] = ()
    """Of layers with a share of the weights, on tensor cores."""

    @property
    def ridge(self) -> float:
        """FLOPs per byte above which the machine computes longer than it moves bytes."""
        return self.peak / self.bandwidth

    def intensity(self, batch_size: float) -> float:
        """FLOPs per byte of a step."""
        return self.flops(batch_size) / self.bytes(batch_size)

    def allowed_seconds(self, batch_size: float) -> float:
        """The least seconds of a step: those of its FLOPs, or of its bytes if they are more."""
        return max(self.flops(batch_size) / self.peak, self.bytes(batch_size) / self.bandwidth)

    @property
    def compute_bound_from(self) -> float | None:
        """The batch size at which the intensity is the ridge; None if it stays below.

        (f + f' B)/(b + b' B) = ridge gives B = (ridge b - f)/(f' - ridge b').
        """
        rise = self.flops.per_example - self.ridge * self.bytes.per_example
        if rise <= 0.0:
            return None
        return max(1.0, (self.ridge * self.bytes.constant - self.flops.constant) / rise)


def advice(roofline: Roofline, timings: Sequence[tuple[int, float]]) -> Iterator[str]:
    """Say what the roofline tells of the choice of a batch size, a sentence each.

    Args:
        roofline: of the workload.
        timings: batch sizes with the measured seconds of a step, ascending; at least one.
    """
    far = []
    for size, seconds in timings:
        if seconds > FAR_FROM_ROOFLINE * roofline.allowed_seconds(size):
            far.append(size)
    if far:
        yield (
            f"up to batch size {far[-1]} a step takes over {FAR_FROM_ROOFLINE:.0f} times what "
            f"arithmetic and memory need: fewer, larger operations help, a faster device does not"
        )
    last = timings[-1][0]
    if not far or far[-1] < last:
        turn = roofline.compute_bound_from
        if turn is None or turn > last:
            yield "large steps are bound by memory: fewer bytes help, such as 16-bit numbers"
        else:
            start = max([turn, *far])
            yield f"steps beyond batch size {number(start, 2)} are bound by arithmetic"
    if roofline.on_tensor_cores:
        yield f"tensor cores want batch sizes that are multiples of {TENSOR_CORE_MULTIPLE}"
        for padding in roofline.paddings[:LAYERS_NAMED]:
            yield (
                f"{padding.layer}: pad {padding.dimension} from {padding.size} to {padding.padded} "
                f"for tensor cores"
            )
