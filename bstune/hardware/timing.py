"""What a survey runs in the worker: steps of real trainings, timed, weighed and counted.

Every measurement is a fit of the recipe with one call-back: the loop is the one that trains.
"""

import gc
import math
import os
import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from bstune.core.clock import WARMUP_STEPS, TrainingClock, processor_wait
from bstune.core.errors import BstuneError
from bstune.hardware.memory import Probe, available_bytes, resident_bytes
from bstune.hardware.roofline import (
    LEAST_SHARE,
    TENSOR_CORE_MULTIPLE,
    Line,
    Padding,
    Roofline,
)
from bstune.hardware.survey import Timed
from bstune.recipe.recipe import Recipe, TrialSettings, resolve_device, settings_of
from bstune.system.failures import one_line
from bstune.trial.lightning import fit
from bstune.trial.trial import BatchSizeRefused, is_out_of_memory
from bstune.trial.worker import tell_progress

# Seconds of steps in a visit, and steps that are timed at least.
VISIT_SECONDS = 0.08
LEAST_STEPS = 2
# Steps of a schedule, at least: the warm-up's, and some that are timed.
LEAST_TOTAL = 2 * WARMUP_STEPS
# Visits to a size, and the quotient of their slowest and fastest above which there is one more.
VISITS = 2
UNSTEADY = 1.05
# More threads are chosen where fewer take so many times as long, in every turn.
THREADS_MARGIN = 1.15
TURNS = 2
# The share of the seconds that the choice of threads may take.
THREADS_SHARE = 0.25
# Seconds of an evaluation in a probe of memory.
EVALUATION_SECONDS = 5.0
# Seconds between two looks at a probe's memory, and the status that one ends with above its limit.
LOOK_SECONDS = 0.005
OVER_LIMIT = 77
# Sides of the matrices, and bytes of the copies, that the limits are measured with.
SIDES = {"cpu": (512, 1024), "cuda": (4096, 8192)}
COPIED = {"cpu": 2**27, "cuda": 2**30}
PEAK_SECONDS = 0.1


class Enough(Exception):
    """Ends a fit that has measured what it was begun for."""


class StepTimer(Callback):
    """Times steps after a warm-up, then ends the fit, after an evaluation if it is to have one.

    Args:
        seconds: of the steps that are timed, at least.
        evaluates: whether the fit ends with an evaluation, of ``EVALUATION_SECONDS`` at most.
    """

    def __init__(self, seconds: float, evaluates: bool = False) -> None:
        self._seconds = seconds
        self._evaluates = evaluates
        self._waited = processor_wait()
        self._steps = 0
        self._warm: int | None = None
        self.waited = 0.0

    @property
    def seconds_per_step(self) -> float:
        """Seconds of a step, once the fit has ended; one at least was timed."""
        ((steps, seconds),) = self.clock.segments
        return seconds / steps

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Let Lightning ask after each batch whether to evaluate."""
        trainer.check_val_every_n_epoch = None
        trainer.val_check_interval = 1

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to warm up; schedules that read a metric do without."""
        for config in trainer.lr_scheduler_configs:
            config.strict = False
        on_cuda = pl_module.device.type == "cuda"
        synchronize = torch.cuda.synchronize if on_cuda else lambda: None
        self.clock = TrainingClock(synchronize=synchronize, waited=self._waited)
        self._global_step = trainer.global_step
        self._phase_began = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the step, and end where there are enough."""
        batches = trainer.fit_loop.total_batch_idx + 1
        trainer.val_check_batch = batches + 1
        tell_progress()
        if trainer.global_step == self._global_step:
            return
        self._global_step = trainer.global_step
        self._steps += 1
        passed = time.perf_counter() - self._phase_began
        if self._warm is None:
            if self._steps >= WARMUP_STEPS or passed >= self._seconds:
                self._warm = self._steps
                self._phase_began = time.perf_counter()
                self._waited_before = self._waited()
                self.clock.start()
            return
        timed = self._steps - self._warm
        if passed < self._seconds or timed < LEAST_STEPS:
            return
        self.clock.stop(timed)
        self.waited = (self._waited() - self._waited_before) / passed
        if not self._evaluates:
            raise Enough
        self._phase_began = time.perf_counter()
        trainer.val_check_batch = batches

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the timing where the trial's steps end before its seconds."""
        self.clock.stop(self._steps - (self._warm or 0))

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *arguments: Any
    ) -> None:
        """End a long evaluation."""
        tell_progress()
        if time.perf_counter() - self._phase_began > EVALUATION_SECONDS:
            raise Enough

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End after the evaluation."""
        raise Enough


def settings_at(batch_size: int, baseline: tuple[int, float], steps: int) -> TrialSettings:
    """What a recipe sees of a measurement at a batch size.

    Below the baseline's size the rate is smaller in proportion: steps that diverge are no trial's.
    """
    size, lr = baseline
    rate = lr * min(1.0, batch_size / size)
    return settings_of(batch_size, rate, max(steps, LEAST_TOTAL))


def _fit_until_enough(recipe: Recipe, trial: TrialSettings, *callbacks: Callback) -> None:
    """Fit until a call-back has enough."""
    # What is imported stays, and need not be walked each time.
    gc.freeze()
    with suppress(Enough):
        fit(recipe, trial, callbacks)
    # Trainer and module refer to each other: they would stay beside the next ones.
    gc.collect()


def probe_memory(
    recipe: Recipe,
    batch_size: int,
    baseline: tuple[int, float],
    steps: int,
    memory_limit: float | None,
) -> Probe:
    """Train and evaluate in this process, which has to be fresh, and tell what it took.

    On a CPU it is resident memory, above whose limit the process ends with ``OVER_LIMIT``. On CUDA
    it is what torch's allocator reserved, which has the limit itself.

    Raises:
        BstuneError: what no batch size would mend.
    """
    if resolve_device(recipe.device) == "cuda":
        free, total = torch.cuda.mem_get_info()
        start = 0.0
        limit = min(memory_limit or math.inf, free)
        torch.cuda.set_per_process_memory_fraction(limit / total)
        peak: Callable[[], float] = torch.cuda.max_memory_reserved
    else:
        start = resident_bytes("VmRSS")
        limit = min(memory_limit or math.inf, available_bytes(start))
        threading.Thread(target=_exit_above, args=(limit,), daemon=True).start()

        def peak() -> float:
            return resident_bytes("VmHWM")

    timer = StepTimer(0.0, evaluates=True)
    try:
        _fit_until_enough(recipe, settings_at(batch_size, baseline, steps), timer)
    # The user's code may raise anything, or call sys.exit.
    except (Exception, SystemExit) as error:  # noqa: BLE001
        refused = "" if is_out_of_memory(error) else _refusal_or_raise(error)
        return Probe(False, peak(), limit, start, refused=refused)
    return Probe(peak() <= limit, peak(), limit, start, timer.seconds_per_step)


def _refusal_or_raise(error: BaseException) -> str:
    """Say in one line why a batch size was refused.

    Any other BstuneError is raised: no batch size would mend it.
    """
    if isinstance(error, BatchSizeRefused):
        return str(error)
    if isinstance(error, BstuneError):
        raise error
    return one_line(error)


def _exit_above(limit: float) -> None:
    """End this process once it takes more than a limit, before the machine ends another one."""
    while resident_bytes("VmRSS") <= limit:
        time.sleep(LOOK_SECONDS)
    os._exit(OVER_LIMIT)


def time_sizes(
    recipe: Recipe,
    sizes: Sequence[int],
    baseline: tuple[int, float],
    steps: int,
    seconds: float,
) -> Timed:
    """Choose torch's threads, then time steps at each batch size in shuffled visits.

    So a machine that slows down slows all sizes alike. A visit that would end too late is left out.

    Args:
        recipe: what is trained; its threads are chosen where they are None, on a CPU.
        sizes: batch sizes.
        baseline: batch size and rate that train.
        steps: of a trial, where a schedule ends.
        seconds: that it may take.

    Raises:
        BstuneError: what no batch size would mend.
    """
    began = time.perf_counter()
    refused: dict[int, str] = {}
    waits = []
    costs: dict[int, float] = {}

    def visit(size: int, threads: int | None) -> float | None:
        """Seconds of a step; None where the size is refused; what no size would mend is raised."""
        start = time.perf_counter()
        timer = StepTimer(VISIT_SECONDS)
        try:
            _fit_until_enough(
                replace(recipe, threads=threads), settings_at(size, baseline, steps), timer
            )
        # The user's code may raise anything, or call sys.exit.
        except (Exception, SystemExit) as error:  # noqa: BLE001
            refused[size] = _refusal_or_raise(error)
            return None
        costs[size] = time.perf_counter() - start
        waits.append(timer.waited)
        return timer.seconds_per_step

    # The first fit of a process is slower: what it imports and compiles, and it tells the costs.
    visit(baseline[0], recipe.threads)
    threads = recipe.threads
    if resolve_device(recipe.device) == "cpu" and threads is None:
        share = THREADS_SHARE * seconds
        ends = sorted({baseline[0], max(sizes)} - refused.keys())
        threads = choose_threads(
            lambda size, count: visit(size, count) or math.inf,
            [size for size in ends if 2 * TURNS * _most_visit_seconds(costs, size) < share],
            lambda: time.perf_counter() - began < share,
        )
    visits, whole = visit_in_turns(
        lambda size: visit(size, threads),
        [size for size in sizes if size not in refused],
        lambda size: _most_visit_seconds(costs, size) <= seconds - (time.perf_counter() - began),
    )
    return Timed(
        threads=threads or torch.get_num_threads(),
        visits=visits,
        refused=refused,
        waited=statistics.fmean(waits or [0.0]),
        whole=whole,
    )


def visit_in_turns(
    visit: Callable[[int], float | None], sizes: Sequence[int], has_time: Callable[[int], bool]
) -> tuple[dict[int, list[float]], bool]:
    """Visit each batch size ``VISITS`` times, in shuffled turns, and the unsteady ones once more.

    Args:
        visit: gives seconds of a step; None where the size is refused, which is not tried again.
        sizes: batch sizes.
        has_time: whether a visit to a size would end in time.

    Returns:
        Seconds of a step in each visit, by batch size, and whether none was left out for time.
    """
    visits: dict[int, list[float]] = {size: [] for size in sizes}
    refused = set()
    whole = True
    shuffle = random.Random(0)  # noqa: S311 (an order, no secret)
    for turn in range(VISITS + 1):
        for size in shuffle.sample(list(sizes), len(sizes)):
            seen = visits[size]
            is_steady = turn >= VISITS and seen and max(seen) < UNSTEADY * min(seen)
            if size in refused or is_steady:
                continue
            if not has_time(size):
                whole = False
                continue
            step = visit(size)
            if step is None:
                refused.add(size)
            else:
                seen.append(step)
    return {size: seen for size, seen in visits.items() if seen}, whole


def _most_visit_seconds(costs: dict[int, float], size: int) -> float:
    """Seconds of a visit at most: as those to a larger size, or in proportion to the largest."""
    if not costs:
        return 0.0
    largest = max(costs)
    if largest < size:
        return costs[largest] * size / largest
    return min(cost for known, cost in costs.items() if known >= size)


def choose_threads(
    seconds: Callable[[int, int], float], sizes: Sequence[int], has_time: Callable[[], bool]
) -> int:
    """Choose torch's number of threads: one, half of torch's own, or all.

    The fewest, unless more are faster by ``THREADS_MARGIN`` in every turn.

    Args:
        seconds: of a step at a batch size with some threads.
        sizes: at which steps are timed; their mean counts, of logarithms.
        has_time: whether there is time for another number.
    """
    most = torch.get_num_threads()
    best, *more = sorted({1, max(most // 2, 1), most})
    turns: dict[int, list[float]] = {}
    for _ in range(TURNS if more and sizes else 0):
        for count in (best, *more):
            if has_time() or not turns:
                logs = [math.log(seconds(size, count)) for size in sizes]
                turns.setdefault(count, []).append(statistics.fmean(logs))
    for count in more:
        pairs = list(zip(turns.get(best, ()), turns.get(count, ()), strict=False))
        if pairs and all(few - many > math.log(THREADS_MARGIN) for few, many in pairs):
            best = count
    return best


def _convolution_backward(
    gradient: torch.Size, x: torch.Size, weight: torch.Size, *arguments: Any, **others: object
) -> int:
    """FLOPs of a convolution's gradients, of its input and of its weight.

    torch's own count gives ``groups`` times those of the weight's gradient.
    """
    is_transposed, wanted = arguments[4], arguments[7]
    # Each element of the output (of the input, if it is transposed) takes a multiplication and an
    # addition for each of a filter's, whose shape is weight[1:].
    elements = math.prod(x if is_transposed else gradient)
    return int(2 * elements * math.prod(weight[1:]) * (wanted[0] + wanted[1]))


class Traffic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the bytes that operations read and write; a view moves none."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        """Run an operation, and add what it reads and writes."""
        output = func(*args, **(kwargs or {}))
        read = _tensor_bytes((args, kwargs))
        written = _tensor_bytes(output)
        if func._schema.is_mutable:
            # What is changed in place is written, whether it is returned or not.
            for argument, value in zip(func._schema.arguments, args, strict=False):
                if argument.is_write:
                    written |= _tensor_bytes(value)
        elif written.keys() <= read.keys():
            return output
        self.bytes += sum(read.values()) + sum(written.values())
        return output


def _tensor_bytes(values: object) -> dict[int, int]:
    """Bytes of the tensors in nested values, by their storage; none counts twice."""
    found: dict[int, int] = {}
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
            storage = leaf.untyped_storage()
            # One that is expanded has more elements than its storage.
            size = min(leaf.numel() * leaf.element_size(), storage.nbytes())
            found[storage.data_ptr()] = max(size, found.get(storage.data_ptr(), 0))
    return found


class StepCost(Callback):
    """Counts FLOPs and bytes of a fit's second step: the first one makes the optimizer's state.

    ``flops`` and ``traffic.bytes`` are those of the whole step, all its micro-batches.
    """

    def __init__(self) -> None:
        self.flops = 0
        self.flop_counter = FlopCounterMode(
            display=False,
            custom_mapping={torch.ops.aten.convolution_backward: _convolution_backward},
        )
        self.traffic = Traffic()

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin to count; what is between two micro-batches, such as loading, is left out."""
        if trainer.fit_loop.total_batch_idx >= trainer.accumulate_grad_batches:
            self._counting = ExitStack()
            self._counting.enter_context(self.flop_counter)
            self._counting.enter_context(self.traffic)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Add what was counted, and end the fit with the step."""
        micro_batches = trainer.accumulate_grad_batches
        trained = trainer.fit_loop.total_batch_idx + 1
        if trained > micro_batches:
            self._counting.close()
            self.flops += self.flop_counter.get_total_flops()
        if trained == 2 * micro_batches:
            self.precision = str(trainer.precision)
            self.paddings = paddings(pl_module)
            raise Enough


def measure_roofline(
    recipe: Recipe, sizes: tuple[int, int], baseline: tuple[int, float], steps: int
) -> Roofline | None:
    """Count a step at two batch sizes, and measure the machine's limits.

    None where torch's counter finds no FLOPs in a step.

    Args:
        recipe: what is trained.
        sizes: the smaller and the larger batch size.
        baseline, steps: as of :func:`time_sizes`.

    Raises:
        Exception: whatever the user's code raises.
    """
    device = resolve_device(recipe.device)
    points = []
    for size in sizes:
        cost = StepCost()
        _fit_until_enough(recipe, settings_at(size, baseline, steps), cost)
        points.append((size, cost.flops, cost.traffic.bytes))
    small, large = points
    if not large[1]:
        return None
    is_half = cost.precision.startswith(("16", "bf16"))
    on_tensor_cores = device == "cuda" and is_half
    return Roofline(
        flops=Line.through(small[:2], large[:2]),
        bytes=Line.through(small[::2], large[::2]),
        peak=_peak(device, cost.precision),
        bandwidth=_bandwidth(device),
        precision=cost.precision,
        on_tensor_cores=on_tensor_cores,
        paddings=cost.paddings if on_tensor_cores else (),
    )


def paddings(module: nn.Module) -> tuple[Padding, ...]:
    """Dimensions that miss the tensor cores' multiple, of layers with a share of the weights."""
    total = sum(parameter.numel() for parameter in module.parameters())
    found = []
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Linear):
            dimensions = {"in_features": layer.in_features, "out_features": layer.out_features}
        elif isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d) and layer.groups == 1:
            dimensions = {"in_channels": layer.in_channels, "out_channels": layer.out_channels}
        else:
            continue
        if layer.weight.numel() < LEAST_SHARE * total:
            continue
        for dimension, size in dimensions.items():
            if size % TENSOR_CORE_MULTIPLE:
                found.append(Padding(layer=name, dimension=dimension, size=size))
    return tuple(found)


def _peak(device: str, precision: str) -> float:
    """FLOP/s of the best square matrix product, 2 n^3 each."""
    width = precision.partition("-")[0]
    dtype = {"bf16": torch.bfloat16, "16": torch.float16, "64": torch.float64}.get(width)
    rates = []
    for side in SIDES[device]:
        matrix = torch.rand(side, side, device=device, dtype=dtype)
        product = torch.empty_like(matrix)
        multiply = partial(torch.mm, matrix, matrix, out=product)
        seconds = _best_seconds(multiply, device)
        rates.append(2.0 * side**3 / seconds)
    return max(rates)


def _bandwidth(device: str) -> float:
    """Bytes/s of a copy within the device's memory, each byte read and written."""
    source = torch.zeros(COPIED[device], dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return 2.0 * COPIED[device] / _best_seconds(lambda: target.copy_(source), device)


def _best_seconds(function: Callable[[], object], device: str) -> float:
    """Seconds of the fastest of the calls within ``PEAK_SECONDS``, after a first one."""
    synchronize: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None
    function()
    synchronize()
    times: list[float] = []
    while sum(times) < PEAK_SECONDS:
        start = time.perf_counter()
        function()
        synchronize()
        times.append(time.perf_counter() - start)
    return min(times)
