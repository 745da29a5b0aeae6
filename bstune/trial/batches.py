"""Batches of exactly B examples, in micro-batches, from an endless stream of shuffled epochs."""

import functools
import inspect
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from bstune.core.errors import ConfigError
from bstune.trial import distributed

# From uint8 images and a generator to images of the same shape. It is given mirror, bool (n,), mean, of the pixels per
# channel, and batch_size, by name, where it has such arguments: see bstune.workloads.images.random_crop_flip. One with
# batch_size is handed several batches at once, and draws for each what it would draw for it alone.
Augment = Callable[..., Tensor]
# Draws the int64 indices of one epoch, (n,), on the generator's device.
Epoch = Callable[[torch.Generator], Tensor]
# What a DataLoader of other batches has of the user's, beside the data set.
KEPT_OPTIONS = (
    *(
        "collate_fn",
        "in_order",
        "multiprocessing_context",
        "num_workers",
        "persistent_workers",
        "pin_memory",
    ),
    *("pin_memory_device", "prefetch_factor", "timeout", "worker_init_fn"),
)


def endless_indices(
    n: int,
    batch_size: int,
    generator: torch.Generator,
    first: int = 0,
    epoch: Epoch | None = None,
) -> Iterator[Tensor]:
    """Yield index tensors (B,), int64, from batch ``first`` on, of one epoch after another, on the generator's device.

    Each epoch is a new permutation of 0 to n - 1, unless ``epoch`` draws its n indices in another way; a batch may
    straddle two, and may then contain an example twice.
    """
    device = generator.device
    epoch = permutation(n) if epoch is None else epoch
    rest = torch.empty(0, dtype=torch.int64, device=device)
    drawn = first * batch_size
    epochs = math.ceil(drawn / n)
    for _ in range(epochs):
        rest = epoch(generator)
    rest = rest[len(rest) - (epochs * n - drawn) :]
    while True:
        if len(rest) < batch_size:
            rest = torch.cat([rest, epoch(generator)])
        yield rest[:batch_size]
        rest = rest[batch_size:]


def permutation(n: int) -> Epoch:
    """Return what draws the numbers 0 to n - 1, each once, in random order."""
    return lambda generator: torch.randperm(n, generator=generator, device=generator.device)


def epoch_of(loader: DataLoader[Any]) -> tuple[int, Epoch] | None:
    """Return how many indices a loader's sampler draws an epoch, and what draws them; None if it is not torch's.

    One that goes through the data in their order is shuffled: see :func:`rebatch`.
    """
    # of a loader that was given its batch_sampler, loader.sampler goes through the whole data set, and is not used
    sampler = loader.batch_sampler.sampler if type(loader.batch_sampler) is BatchSampler else None
    if type(sampler) is SequentialSampler:
        n = len(sampler.data_source)
        return n, permutation(n)
    if type(sampler) is SubsetRandomSampler:
        chosen = torch.as_tensor(sampler.indices)
        places = permutation(len(chosen))
        return len(chosen), lambda generator: chosen[places(generator)]
    if type(sampler) is WeightedRandomSampler:
        weights, count, replacement = sampler.weights, sampler.num_samples, sampler.replacement
        return count, lambda generator: torch.multinomial(
            weights, count, replacement, generator=generator
        )
    if type(sampler) is not RandomSampler:
        return None
    count, n = sampler.num_samples, len(sampler.data_source)
    if sampler.replacement:
        return count, lambda generator: torch.randint(n, (count,), generator=generator)
    order, orders = permutation(n), math.ceil(count / max(n, 1))
    return count, lambda generator: torch.cat([order(generator) for _ in range(orders)])[:count]


def micro_batch_sizes(batch_size: int, micro_batch_size: int | None) -> tuple[int, ...]:
    """Return the sizes n_i of the micro-batches of one batch: all equal but the last, which may be smaller.

    Of a trial on several devices they are this process's, and differ by one example at most.
    """
    check_size("batch size", batch_size)
    if micro_batch_size is not None:
        check_size("micro-batch size", micro_batch_size)
    if distributed.place() is not None:
        sizes, own = distributed.sizes_of_process(batch_size, micro_batch_size)
        return sizes[own]
    if micro_batch_size is None:
        return (batch_size,)
    whole, last = divmod(batch_size, micro_batch_size)
    return (micro_batch_size,) * whole + ((last,) if last else ())


def splitter(batch_size: int, micro_batch_size: int | None) -> Callable[[Tensor], Sequence[Tensor]]:
    """Return what cuts a whole batch into micro-batches, on several devices into this process's alone."""
    if distributed.place() is not None:
        sizes, own = distributed.sizes_of_process(batch_size, micro_batch_size)
        return lambda whole: whole.split_with_sizes(sizes)[own]
    sizes = micro_batch_sizes(batch_size, micro_batch_size)
    return lambda whole: whole.split_with_sizes(sizes)


def weight_micro_batches(module: LightningModule, sizes: Sequence[int], batch_size: int) -> None:
    """Make the accumulated gradient the large batch's: weight the loss of micro-batch i by n_i/B.

    Args:
        module: whose training step is changed.
        sizes: n_i, of each micro-batch of a batch, on this device.
        batch_size: B, their sum over all devices.
    """
    devices = distributed.count()
    if not module.automatic_optimization:
        what, instead = ("split over devices", "devices=1") if devices > 1 else ("", "")
        raise ConfigError(
            f"{type(module).__name__} steps its optimizers itself (manual optimization), so its batches cannot be "
            f"{what or 'accumulated from micro-batches'}: set {instead or 'protocol.micro_batch_size=null'}"
        )
    step = module.training_step

    @functools.wraps(step)
    def weighted(*args: Any, **kwargs: Any) -> Any:
        output = step(*args, **kwargs)
        # Lightning divides each of the k losses by k, and DDP the gradients' sum by the number of devices. The batch's
        # number is the Trainer's: a step need not take it.
        size = sizes[module.trainer.fit_loop.batch_idx % len(sizes)]
        weight = devices * len(sizes) * size / batch_size
        if isinstance(output, Mapping):
            return {**output, "loss": output["loss"] * weight}
        return None if output is None else output * weight

    module.training_step = weighted  # type: ignore[method-assign]


def check_size(name: str, size: int) -> None:
    """Raise a ConfigError that says ``name`` if ``size`` is not a positive integer."""
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ConfigError(f"{name} must be a positive integer, but got {size!r}")


def seeded_generators(
    seed: int, device: torch.device | str, count: int
) -> tuple[torch.Generator, ...]:
    """Return independent generators on ``device``, all a function of ``seed``."""
    states = np.random.SeedSequence(seed).generate_state(count, np.uint64)
    return tuple(torch.Generator(device).manual_seed(int(state)) for state in states)


def random_state() -> dict[str, Any]:
    """Return the state of the generators of Python, numpy, torch and, where it is in use, CUDA, as plain data."""
    name, keys, position, has_gauss, gauss = np.random.get_state()
    state = {
        "python": random.getstate(),
        "numpy": (
            name,
            torch.from_numpy(np.asarray(keys, np.int64)),
            int(position),
            int(has_gauss),
            float(gauss),
        ),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Set the generators to what :func:`random_state` returned."""
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


@dataclass(frozen=True)
class Normalisation:
    """Turns pixels into ``pixels * scale + shift``, both (1, channels, 1, 1), on the images' device.

    It is computed in float32, and then rounded to ``dtype``, as autocast would round it for a convolution.
    """

    scale: Tensor
    shift: Tensor
    dtype: torch.dtype = torch.float32
    memory_format: torch.memory_format = torch.preserve_format

    @property
    def mean(self) -> Tensor:
        """The pixels that become 0, (1, channels, 1, 1)."""
        return -self.shift / self.scale

    def __call__(self, images: Tensor) -> Tensor:
        """Return images of the same shape; ``images`` itself is left as it is."""
        # One conversion, then in place: on a CPU faster than type promotion, and much faster than addcmul.
        pixels = images.to(torch.float32, copy=True, memory_format=self.memory_format)
        return pixels.mul_(self.scale).add_(self.shift).to(self.dtype)


class IndexStream:
    """Batches of :func:`endless_indices` that can be resumed at a position, with the generators of the augmentation.

    ``together`` batches are drawn at once, and the generators are kept as before each such group. Of groups of one that
    is done while ``remembers`` is set: Lightning fetches, and so augments, one batch ahead.
    """

    def __init__(
        self,
        n: int,
        batch_size: int,
        order: torch.Generator,
        get_random: Callable[[], Any] = lambda: None,
        set_random: Callable[[Any], object] = lambda state: None,
        together: int = 1,
        epoch: Epoch | None = None,
    ) -> None:
        check_size("batch size", batch_size)
        if batch_size > n:
            raise ConfigError(
                f"batch size {batch_size} is larger than the data set ({n} examples): lower the largest batch size"
            )
        group_size = batch_size * together
        self.remembers = False
        self.drawn = 0  # batches that were handed out, from the first of the stream
        self.together = together
        self._start = functools.partial(endless_indices, n, group_size, order, epoch=epoch)
        self._get_random, self._set_random = get_random, set_random
        self._indices = self._start(0)
        self._remembered: tuple[int, Any] | None = None
        self._resumed: Any = None

    def __iter__(self) -> Iterator[Tensor]:
        """Yield the indices of one batch after another, where they are not drawn together."""
        while True:
            index = self.draw()
            self.drawn += 1
            yield index

    def draw(self) -> Tensor:
        """Return the indices of the group of batches that the next one is in, whose first ones may be handed out."""
        if self._resumed is not None:
            self._set_random(self._resumed)
            self._resumed = None
        if self.remembers or self.together > 1:
            self._remembered = self._first_of_group(self.drawn), self._get_random()
        return next(self._indices)

    def position(self, batches: int) -> dict[str, Any]:
        """Return the position after ``batches`` batches, all that are drawn or all but a remembered one, as data."""
        state, first = self._get_random(), self._first_of_group(batches)
        if state is not None and first != self.drawn:
            if self._remembered is None or self._remembered[0] != first:
                raise ValueError(
                    f"the position after {batches} batches is not remembered: {self.drawn} are drawn"
                )
            state = self._remembered[1]
        return {"batches": batches, "random": state}

    def _first_of_group(self, batches: int) -> int:
        return batches - batches % self.together

    def resume(self, position: Mapping[str, Any]) -> None:
        """Go on from a position of a stream of the same arguments, before any batch is drawn."""
        if self.drawn:
            raise ValueError(
                f"only a fresh stream can be resumed, but {self.drawn} batches are drawn"
            )
        self.drawn, self._resumed = position["batches"], position["random"]
        self._indices = self._start(self.drawn // self.together)


class TrainBatches:
    """Endless training batches (x, y) from uint8 images (n, channels, height, width) and labels on one device.

    Each iterator goes on where the last left off, at the next whole batch. Order and augmentation depend on ``seed``
    alone, not on ``micro_batch_size``. With ``alternating_flip`` an image is mirrored at random in its first epoch and
    then every other time, as in cifar10-airbench (Jordan 2024, arXiv 2404.00498, section 3.6).

    Where several batches have at most ``at_once`` examples, they are made together, by as many operators as one, and
    are the same to the bit: on an accelerator the host's time to launch them would be a large part of a short step. An
    augmentation without an argument ``batch_size`` is called for each batch.
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        *,
        batch_size: int,
        micro_batch_size: int | None,
        seed: int,
        normalise: Normalisation,
        augment: Augment | None = None,
        alternating_flip: bool = False,
        at_once: int = 1,
    ) -> None:
        self.batch_size = batch_size
        self.micro_batch_sizes = micro_batch_sizes(batch_size, micro_batch_size)
        self._split = splitter(batch_size, micro_batch_size)
        # A generator each: the order must not depend on how many numbers the augmentation draws.
        order, self._augment_generator, first_epoch = seeded_generators(seed, images.device, 3)
        self._images, self._labels, self._normalise = images, labels, normalise
        drawn_from = self._augment_generator
        random_states: dict[str, Any] = {}
        if augment is not None:
            random_states = {"get_random": drawn_from.get_state, "set_random": drawn_from.set_state}
        together = max(1, min(at_once, len(images)) // batch_size)
        if augment is not None and "batch_size" not in inspect.signature(augment).parameters:
            together = 1
        check_size("batch size", batch_size)
        self.stream = IndexStream(
            len(images), batch_size, order, together=together, **random_states
        )
        self._made: Iterator[tuple[Tensor, Tensor]] = iter(())  # whole batches, not yet handed out
        self._augment = (
            None
            if augment is None
            else bind_augmentation(augment, normalise.mean, alternating_flip)
        )
        self._mirrored: Tensor | None = None
        if alternating_flip:
            self._mirrored = torch.randint(
                2, (len(images),), generator=first_epoch, device=images.device
            ).bool()

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        stream, split, together = self.stream, self._split, self.stream.together > 1
        while True:
            images, labels = self._next_made() if together else self._make()
            stream.drawn += 1
            for x, y in zip(split(images), split(labels), strict=True):
                # Several batches were normalised when they were made. A single one may be too large for that.
                yield (x if together else self._normalise(x)), y

    def _next_made(self) -> tuple[Tensor, Tensor]:
        """Return the next batch of those that are made together, normalised; make more where none is left."""
        batch = next(self._made, None)
        if batch is None:
            done = self.stream.drawn % self.stream.together  # of a group that a stopped trial began
            images, labels = self._make()
            images = self._normalise(images)
            parts = zip(
                torch.split(images, self.batch_size),
                torch.split(labels, self.batch_size),
                strict=True,
            )
            self._made = islice(parts, done, None)
            batch = next(self._made)
        return batch

    def _make(self) -> tuple[Tensor, Tensor]:
        """Return the next batches that are made together as one, augmented."""
        stream, device = self.stream, self._images.device
        index = stream.draw()
        images = self._images.index_select(0, index)
        labels = self._labels.index_select(0, index)
        # Whole batches, so that what is drawn does not depend on micro-batches.
        options: dict[str, Any] = {} if stream.together == 1 else {"batch_size": self.batch_size}
        mirror = None
        if self._mirrored is not None:
            first = (stream.drawn - stream.drawn % stream.together) * self.batch_size
            epoch = torch.arange(first, first + len(index), device=device) // len(self._images)
            mirror = self._mirrored[index] ^ (epoch % 2 == 1)
        if self._augment is not None:
            options |= {} if mirror is None else {"mirror": mirror}
            images = self._augment(images, self._augment_generator, **options)
        elif mirror is not None:
            images = torch.where(mirror.view(-1, 1, 1, 1), images.flip(-1), images)
        return images, labels


def bind_augmentation(augment: Augment, mean: Tensor, alternating_flip: bool) -> Augment:
    """Return an augmentation with the mean of the pixels (1, channels, 1, 1), if it asks for it."""
    arguments = inspect.signature(augment).parameters
    if alternating_flip and "mirror" not in arguments:
        inner = augment.func if isinstance(augment, functools.partial) else augment
        raise ConfigError(
            "workload.data.alternating_flip needs an augmentation with an argument mirror, such as "
            f"bstune.workloads.images.random_crop_flip, but got {getattr(inner, '__name__', type(inner).__name__)}: "
            "set workload.data.alternating_flip to false"
        )
    return functools.partial(augment, mean=mean) if "mean" in arguments else augment


class EvalBatches:
    """Evaluation batches (x, y) in the order of the data, none without data; only the last may be smaller."""

    def __init__(
        self, images: Tensor, labels: Tensor, *, batch_size: int, normalise: Normalisation
    ) -> None:
        check_size("evaluation batch size", batch_size)
        self.batch_size = batch_size
        self._images, self._labels, self._normalise = images, labels, normalise

    def in_batches_of(self, size: int) -> "EvalBatches":
        """Hand out the same examples in batches of another size."""
        return EvalBatches(self._images, self._labels, batch_size=size, normalise=self._normalise)

    def __len__(self) -> int:
        return -(-len(self._images) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, len(self._images), self.batch_size):
            stop = start + self.batch_size
            yield self._normalise(self._images[start:stop]), self._labels[start:stop]


class StreamBatchSampler(Sampler[list[int]]):
    """Yields lists of indices, one micro-batch each, of an endless stream in epochs of n // B batches.

    What an epoch leaves over of its n examples is in the first batch of the next one. What reading the indices
    ``in_process`` draws is part of the stream's position. ``epoch`` draws the indices of one; None: a permutation.
    """

    def __init__(
        self,
        n: int,
        batch_size: int,
        micro_batch_size: int | None,
        generator: torch.Generator,
        in_process: bool,
        epoch: Epoch | None = None,
    ) -> None:
        self.micro_batch_sizes = micro_batch_sizes(batch_size, micro_batch_size)
        self._split = splitter(batch_size, micro_batch_size)
        random_states: dict[str, Any] = {}
        if in_process:
            random_states = {"get_random": random_state, "set_random": set_random_state}
        self.stream = IndexStream(n, batch_size, generator, epoch=epoch, **random_states)
        # Of one epoch, in batches.
        self._length = n // batch_size
        self._in_process, self._fresh = in_process, True

    def __len__(self) -> int:
        return self._length * len(self.micro_batch_sizes)

    def __iter__(self) -> Iterator[list[int]]:
        drawn = self.stream.drawn
        # Where a trial goes on after a whole epoch, Lightning takes an iterator of that one too, and reads none of it;
        # worker processes would read ahead.
        has_ended = drawn > 0 and drawn % self._length == 0
        is_ended = self._fresh and not self._in_process and has_ended
        self._fresh = False
        left = 0 if is_ended else self._length - drawn % self._length
        for index in islice(self.stream, left):
            for part in self._split(index):
                yield part.tolist()


def endless(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield batches of one epoch after another; an iterable without any is an end."""
    some = True
    while some:
        some = False
        for batch in batches:
            some = True
            yield batch


def epoch_length(loader: DataLoader[Any]) -> int:
    """Return how many examples an epoch of a loader has, whose data set has a length: those that its sampler draws."""
    drawn = epoch_of(loader)
    return len(loader.dataset) if drawn is None else drawn[0]  # type: ignore[arg-type]


def stream_of(batches: object) -> IndexStream:
    """Return the stream behind :class:`TrainBatches`, or behind what :func:`rebatch` returned."""
    source = batches.batch_sampler if isinstance(batches, DataLoader) else batches
    stream = getattr(source, "stream", None)
    if isinstance(stream, IndexStream):
        return stream
    raise ConfigError(
        f"a trial on batches from {type(batches).__name__} cannot be stopped to go on later: take them from "
        "TrainBatches, or from a DataLoader through rebatch()"
    )


def loaders_of(loaders: Any) -> list[Any]:
    """Return the loaders in what a data module returns: one, or a collection of them, as Lightning takes it."""
    if isinstance(loaders, Mapping):
        return list(loaders.values())
    # Lightning's CombinedLoader has them flattened.
    return list(
        loaders if isinstance(loaders, list | tuple) else getattr(loaders, "flattened", [loaders])
    )


def rebatch(
    loader: object,
    batch_size: int,
    micro_batch_size: int | None,
    seed: int,
) -> DataLoader[Any]:
    """Return a DataLoader like ``loader`` whose batches hold exactly B examples, shuffled, n // B of them an epoch.

    Each epoch goes on in an endless stream of the shuffled examples, so that all batches are whole.
    One of torch's samplers that draws a part of the examples, or with replacement or weights, still
    does, n numbers an epoch. A resumed trial reads the same examples and draws the same numbers from
    the generators of Python, numpy and torch, but not in worker processes, nor from generators of
    the data set.
    """
    if not isinstance(loader, DataLoader):
        raise ConfigError(
            f"the training data must come from a torch DataLoader over a map-style data set, but got"
            f" {type(loader).__name__}: return one from train_dataloader(), or build batches of the wanted size there"
        )
    problem = not_rebatchable(loader)
    if problem:
        raise ConfigError(
            f"the batch size of the training DataLoader cannot be set: {problem}. Return DataLoader(dataset,"
            " batch_size=..., shuffle=True) over a map-style data set, with a Subset to choose its examples"
        )
    order, workers = seeded_generators(seed, "cpu", 2)
    drawn = epoch_of(loader)
    assert drawn is not None  # noqa: S101  # it would have been refused
    n, epoch = drawn
    check_size("batch size", batch_size)
    sampler = StreamBatchSampler(
        n, batch_size, micro_batch_size, order, loader.num_workers == 0, epoch
    )
    kept = {name: getattr(loader, name) for name in KEPT_OPTIONS}
    kept["persistent_workers"] = loader.num_workers > 0  # large batches make short epochs
    return DataLoader(loader.dataset, batch_sampler=sampler, generator=workers, **kept)


def not_rebatchable(loader: object) -> str | None:
    """Return why other batches from the same loader would not be the same problem; None if they would be."""
    if not isinstance(loader, DataLoader):
        return f"it returns a {type(loader).__name__}, not a torch DataLoader"
    if isinstance(loader.dataset, IterableDataset):
        return f"its data set, {type(loader.dataset).__name__}, is iterable and decides itself what comes next"
    if not hasattr(loader.dataset, "__len__"):
        return f"its data set, {type(loader.dataset).__name__}, has no length"
    if type(loader).__iter__ is not DataLoader.__iter__:
        return f"{type(loader).__name__} has an __iter__ of its own"
    if type(loader.batch_sampler) is not BatchSampler:
        return f"it has no batch size of its own (batch_sampler is {type(loader.batch_sampler).__name__})"
    if epoch_of(loader) is None:
        name = type(loader.batch_sampler.sampler).__name__
        return f"its sampler, {name}, is not one of torch's, whose epochs can be drawn again"
    return None
