"""The search for the memory ceiling, driven by laws of memory whose answer is known; and what the machine allows."""

import math
import mmap
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from bstune.core.errors import HardwareError
from bstune.hardware import memory
from bstune.hardware.memory import Ceiling, MemoryModel, ProbeResult, find_ceiling, fit_memory

MiB = 2**20
LIMIT = 1024 * MiB
HIGH = 50_000

LAWS: dict[str, Callable[[int], float]] = {
    "linear": lambda size: 450 * MiB + 0.5 * MiB * size,
    "large examples": lambda size: 100 * MiB + 30 * MiB * size,
    "small examples": lambda size: 400 * MiB + 0.02 * MiB * size,
    "rounded to 20 MiB": lambda size: math.ceil((300 + 0.7 * size) / 20) * 20 * MiB,
    "workspace from 700": lambda size: (300 + 0.3 * size + 150 * (size > 700)) * MiB,
    "powers of two": lambda size: (300 + 0.3 * 2 ** math.ceil(math.log2(size))) * MiB,
    "quadratic": lambda size: 300 * MiB + 200.0 * size**2,
    "concave": lambda size: (300 + 30 * size**0.45) * MiB,
    "start-up peak": lambda size: max(700, 300 + 0.5 * size) * MiB,
    "a dip": lambda size: (300 + 0.5 * size - 100 * (800 < size < 900)) * MiB,
    "a hump": lambda size: (300 + 0.5 * size + 400 * (900 < size < 1000)) * MiB,
}
STRAIGHT = ("linear", "large examples", "small examples", "a dip")


class Machine:
    """Answers probes from a law, and remembers which batch sizes it was asked; other ``outcomes`` come first."""

    def __init__(self, law, noise=0.0, seed=0, outcome=lambda size: None):
        self.law = law
        self.noise = noise
        self.outcome = outcome
        self.asked = []
        self.generator = np.random.default_rng(seed)

    def __call__(self, size):
        self.asked.append(size)
        outcome = self.outcome(size)
        if outcome is not None:
            return ProbeResult(size, outcome, LIMIT, message="its reason")
        taken = int(self.law(size) * (1.0 + self.noise * self.generator.standard_normal()))
        if taken > LIMIT:
            return ProbeResult(size, "training", LIMIT)
        return ProbeResult(size, "fits", LIMIT, taken, taken)


def search(probe, low=1, high=HIGH, **others):
    return find_ceiling(
        probe,
        low,
        high,
        **{"multiple": 1, "relative": 0.0, "largest_first": False, "verify": 0} | others,
    )


def doubling_and_bisection(law):
    """The probes of doubling from 2, then bisection: what Lightning's finder does."""
    low = 1
    bad = None
    size = 2
    probes = 0
    while bad is None or bad - low > 1:
        probes += 1
        low, bad = (size, bad) if law(size) <= LIMIT else (low, size)
        size = size * 2 if bad is None else (low + bad) // 2
    return probes


@pytest.mark.parametrize(
    ("multiple", "relative", "largest_first"),
    [
        (1, 0.0, False),
        (1, 0.0, True),
        (8, 0.0, False),
        (1, 0.01, False),
        (8, 0.01, True),
        (64, 0.0, True),
    ],
)
@pytest.mark.parametrize("name", LAWS)
def test_the_ceiling_fits_and_what_is_above_it_by_the_precision_does_not(
    name, multiple, relative, largest_first
):
    # The ceiling of 30 examples is no multiple.
    if name == "large examples" and multiple > 30:
        pytest.skip("a candidate of its own")
    law = LAWS[name]
    machine = Machine(LAWS[name])
    found = search(machine, multiple=multiple, relative=relative, largest_first=largest_first)
    assert {found.batch_size, found.above.batch_size} <= set(machine.asked)
    assert len(set(machine.asked)) == len(machine.asked)
    assert law(found.batch_size) <= LIMIT < law(found.above.batch_size)
    assert found.above.batch_size - found.batch_size <= max(multiple, relative * found.batch_size)
    assert found.batch_size in (1, HIGH) or found.batch_size % multiple == 0
    assert [result.batch_size for result in found.probes] == machine.asked
    if not largest_first:
        assert len(machine.asked) <= doubling_and_bisection(law)
    if not largest_first and name in STRAIGHT:
        assert len(machine.asked) <= min(6, doubling_and_bisection(law) / 2)
        assert found.model_error < 1e-6


@pytest.mark.parametrize(("verify", "seeds"), [(0, 20), (1, 8), (3, 8)])
def test_noise_of_one_percent(verify, seeds):
    """Unverified, the answer is as far off as the noise is in examples: 1% of 1 GiB is 20 examples here."""
    for seed in range(seeds):
        found = search(Machine(LAWS["linear"], noise=0.01, seed=seed), relative=0.01, verify=verify)
        at = [result.fits for result in found.probes if result.batch_size == found.batch_size]
        assert at == [True] * (1 + verify)
        assert found.above in found.probes
        assert not found.above.fits
        assert found.above.batch_size - found.batch_size <= max(1, 0.01 * found.batch_size)
        if verify:
            assert 0.0 < found.spread < 0.08
        else:
            assert abs(found.batch_size - 1148) <= 3.5 * 0.01 * LIMIT / (0.5 * MiB)
            assert len(found.probes) <= 12


def test_a_largest_size_that_fits_only_once_is_not_returned():
    answers = iter([None, "training"])
    machine = Machine(LAWS["linear"], outcome=lambda size: next(answers) if size == 600 else None)
    found = search(machine, high=600, largest_first=True, verify=1)
    assert (found.batch_size, found.above.batch_size) == (599, 600)


@pytest.mark.parametrize(
    ("largest_first", "asked"), [(True, [1200, 1]), (False, [1, 16, 256, 1200])]
)
def test_a_range_that_fits_ends_at_its_largest(largest_first, asked):
    machine = Machine(lambda size: 400 * MiB + 2e3 * size)
    found = search(machine, high=1200, largest_first=largest_first, multiple=8)
    assert (found.smallest, found.batch_size, found.above, machine.asked) == (1, 1200, None, asked)


@pytest.mark.parametrize(
    ("outcome", "asked", "message"),
    [
        ("training", 1, "there is no memory for batch size 1: training does not fit in 1,024 MiB"),
        (
            "evaluation",
            1,
            "training at batch size 1 fits in 1,024 MiB, but the evaluation does not",
        ),
        ("startup", 1, "the data and the model alone do not fit in 1,024 MiB"),
        # 1 to 64, in powers of two.
        ("error", 7, "fails at every batch size that was tried.*its reason"),
        ("device", 1, r"lost while batch size \d+ was probed: its reason\. Check"),
    ],
)
@pytest.mark.parametrize("largest_first", [False, True])
def test_nothing_fits(outcome, asked, message, largest_first):
    machine = Machine(LAWS["linear"], outcome=lambda size: outcome)
    with pytest.raises(HardwareError, match=message):
        search(machine, high=64, largest_first=largest_first)
    assert len(machine.asked) == asked + (largest_first and outcome != "device")


@pytest.mark.parametrize("smallest", [2, 3, 21])
def test_the_range_starts_at_the_smallest_size_that_runs(smallest):
    found = search(
        Machine(LAWS["linear"], outcome=lambda size: "error" if size < smallest else None)
    )
    assert (found.smallest, found.batch_size) == (smallest, 1148)
    text = (
        "batch size 1 fails for another reason than memory (its reason): the range starts at "
        f"{smallest}"
    )
    assert found.notes == (text,)


@pytest.mark.parametrize("outcome", ["error", "evaluation"])
def test_what_fails_at_large_sizes_is_no_lack_of_memory_in_training(outcome):
    reported = []
    machine = Machine(LAWS["linear"], outcome=lambda size: outcome if size > 600 else None)
    found = search(machine, report=reported.append)
    assert tuple(reported) == found.probes
    assert (found.batch_size, found.above.outcome) == (600, outcome)
    note = (
        "batch size 601 fails for another reason than memory (its reason): the range ends below it"
    )
    assert found.notes == ((note,) if outcome == "error" else ())


@pytest.mark.parametrize(
    ("points", "model"),
    [
        ([(1, 110), (6, 160), (11, 210)], (100, 10)),
        # Memory does not fall with the batch size.
        ([(1, 200), (11, 100)], (150, 0)),
        ([], None),
        # There is no line through one point.
        ([(1, 5)], None),
        ([(1, None)] * 3, None),
    ],
)
def test_fit(points, model):
    found = fit_memory([ProbeResult(size, "fits", LIMIT, taken, taken) for size, taken in points])
    assert (found and (found.base, found.per_example)) == (model and pytest.approx(model, abs=1e-9))


def test_the_spread_in_examples():
    at = ProbeResult(100, "fits", LIMIT, 500 * MiB, 500 * MiB)
    found = Ceiling(at, None, 1, 1, 0.02, MemoryModel(0.0, 2.0 * MiB), None, ())
    # The spread is 10 MiB.
    assert found.spread_examples == 5
    assert (
        replace(found, spread=None).spread_examples
        is replace(found, model=None).spread_examples
        is None
    )


MEMINFO = {"proc/meminfo": "MemTotal:  4096 kB\nMemAvailable:    2048 kB\n"}


def v2(group, **limits):
    files = {
        f"sys/fs/cgroup/{folder.replace('_', '/')}memory.max": text
        for folder, text in limits.items()
    }
    return {"proc/self/cgroup": f"0::{group}\n", **files}


V1 = {
    "proc/self/cgroup": "5:devices:/x\n4:memory,hugetlb:/x\n0::/\n",
    "sys/fs/cgroup/memory/x/memory.limit_in_bytes": "500100\n",
    # How the kernel writes that there is no limit: 2^63 - 4096.
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    "sys/fs/cgroup/devices/x/memory.limit_in_bytes": "1\n",
}


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        (v2("/", **{"": "99\n"}), None),
        (MEMINFO, 2048 * 1024),
        ({"proc/meminfo": "MemTotal:  4096 kB\n"}, 4096 * 1024),
        # Less the 100 bytes that are resident.
        (MEMINFO | v2("/a/b", a_b_="500100\n", a_="900000\n"), 500_000),
        (MEMINFO | v2("/a/b", a_b_="max\n", a_="max\n"), 2048 * 1024),
        (MEMINFO | v2("/gone/in/a/namespace", **{"": "500100\n"}), 500_000),
        (MEMINFO | v2("/", **{"": "99999999999\n"}), 2048 * 1024),
        (v2("/", **{"": "500100\n"}), 500_000),
        (MEMINFO | V1, 500_000),
    ],
)
def test_memory_limit(files, limit, tmp_path):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    if limit is None:
        with pytest.raises(
            HardwareError,
            match=r"no memory is left for a probe: the container's 99 bytes.*takes 100",
        ):
            memory.memory_limit(tmp_path, 100)
    else:
        assert memory.memory_limit(tmp_path, 100) == limit


def test_the_peak_is_the_most_that_was_resident():
    before = memory.resident_bytes()
    # These pages are new, whatever the allocator has freed and kept.
    with mmap.mmap(-1, 64 * MiB) as block:
        block.write(b"1" * 64 * MiB)
        assert memory.resident_bytes() - before > 60 * MiB
    assert memory.peak_resident_bytes() - before > 60 * MiB


@pytest.mark.parametrize("probes", range(1, 8))
@pytest.mark.parametrize("largest_first", [False, True])
def test_without_time_for_more_probes_the_ceiling_is_the_largest_that_fitted(probes, largest_first):
    machine = Machine(LAWS["linear"])
    found = search(
        machine,
        3,
        largest_first=largest_first,
        verify=2,
        is_late=lambda: len(machine.asked) >= probes,
    )
    exact = (LIMIT - 450 * MiB) // (MiB // 2)
    # The largest of all, and the smallest, are probed in any case.
    least = 2 if largest_first else 1
    assert len(machine.asked) <= max(probes, least)
    assert found.batch_size == max(size for size in machine.asked if size <= exact)
    if found.above is not None:
        assert found.precision == found.above.batch_size - found.batch_size
        assert len(found.notes) == (found.precision > 1)


@pytest.mark.parametrize(
    ("law", "probed", "largest", "predicted"),
    [
        # These take 480 MiB, less than half of 1,024.
        ("small examples", (64, 128), 4096, 4096),
        # These take 490 MiB.
        ("large examples", (1, 2), 64, 13),
        # The probes themselves took more than half.
        ("large examples", (1, 16), 64, None),
        # There is no line through one probe.
        ("large examples", (4,), 64, None),
        # There is nothing larger.
        ("small examples", (64, 128), 128, None),
    ],
)
def test_batch_sizes_that_there_is_no_time_to_probe(law, probed, largest, predicted):
    found = search(Machine(LAWS[law]), probed[0], probed[-1], largest_first=True)
    extended = found.extended(largest)
    assert extended.predicted == predicted
    assert extended.batch_size == (predicted or probed[-1])
    assert extended.at == found.at
    is_said = predicted is not None or (law == "large examples" and len(probed) > 1)
    assert len(extended.notes) == is_said
