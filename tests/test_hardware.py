"""Memory, step times and the roofline: closed forms, NVIDIA's figures, and a real survey."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from refusals import cases
from small import Data, Model
from torch import nn

from bstune.core.errors import InputError, UserCodeError
from bstune.hardware.memory import Probe, available_bytes, find_largest_fit
from bstune.hardware.roofline import Line, Padding, Roofline, advice
from bstune.hardware.survey import (
    Survey,
    Timing,
    cached_survey,
    code_and_layers,
    ladder_of,
    survey,
    survey_key,
)
from bstune.hardware.timing import (
    StepCost,
    Traffic,
    choose_threads,
    measure_roofline,
    paddings,
    probe_memory,
    visit_in_turns,
)
from bstune.recipe.recipe import Recipe
from bstune.report.figure import roofline_figure
from bstune.system.files import write_text
from bstune.trial.worker import Worker, call, value_of

START, LIMIT = 300.0, 1000.0


def probe(memory, size, refuses=lambda size: False):
    if refuses(size):
        return Probe(False, START, LIMIT, START, refused="ValueError")
    return Probe(memory(size) <= LIMIT, min(memory(size), LIMIT), LIMIT, START)


@pytest.mark.parametrize(
    "memory, first, truth",
    [
        (lambda size: START + 0.1 * size, 64, 4096),  # all fit
        (lambda size: START + 1.0 * size, 64, 700),
        (lambda size: START + 0.01 * size**2, 16, 264),
        (lambda size: START + 10.0 * size, 128, 70),  # the first one does not fit
    ],
)
def test_the_largest_size_that_fits(memory, first, truth):
    found = find_largest_fit(partial(probe, memory), 1, 4096, first)
    assert found.whole
    assert len(found.probes) <= 8
    assert 0.9 * truth <= found.largest_fit <= truth
    assert memory(found.largest_fit) <= LIMIT < memory(found.smallest_unfit or 1e9)
    assert find_largest_fit(partial(probe, lambda size: 2000.0), 1, 4096, 64).largest_fit is None


def test_a_refused_size_bounds_the_range_and_multiples_are_kept():
    one = partial(probe, lambda size: START + size, refuses=lambda size: size > 256)
    found = find_largest_fit(one, 8, 512, 64, multiple=8)
    assert 240 <= found.largest_fit <= 256
    assert found.smallest_unfit is None
    assert all(size % 8 == 0 for size in found.probes)
    # What a multiple explains is passed over, also at the end of the range.
    for constant, slope, high, largest in ((580.0, 5.0, 200, 84), (300.0, 1.0, 81, 80)):
        line = Line(constant=constant, per_example=slope)
        found = find_largest_fit(partial(probe, line, refuses=lambda b: b % 2), 1, high, 16)
        assert 0.9 * largest <= found.largest_fit <= largest
        assert len(found.probes) <= 6
    # Without time a size far below the limit is predicted.
    for slope, largest in ((0.01, 4096), (5.0, 64)):
        one = partial(probe, lambda size, slope=slope: START + slope * size)
        found = find_largest_fit(one, 1, 4096, 64, has_time=lambda size: False)
        assert (found.largest_fit, found.whole, len(found.probes)) == (largest, False, 1)


@cases("""
cgroup | files | left
null | {} | 8192000
'0::/a/b' | {a/memory.max: max, a/b/memory.max: '9000'} | 5000
'4:memory:/gone' | {memory/memory.limit_in_bytes: '9000'} | 6000
""")
def test_available_memory(tmp_path, cgroup, files, left):
    texts = {"proc/meminfo": "MemAvailable: 8000 kB\n", "proc/self/cgroup": cgroup or ""}
    for name, text in files.items():
        folder = f"sys/fs/cgroup/{name.rpartition('/')[0]}"
        texts[f"sys/fs/cgroup/{name}"] = text
        used = (f"{folder}/memory.current", f"{folder}/memory.usage_in_bytes")
        texts |= dict.fromkeys(used, "5000")
        texts[f"{folder}/memory.stat"] = "inactive_file 1000\ntotal_inactive_file 2000\n"
    for name, text in texts.items():
        write_text(tmp_path / name, text)
    assert available_bytes(7.0, tmp_path) == left + 7.0


def test_bytes_of_operations():
    """Of numbers of 4 bytes: 100 are made, read and written; a view is counted once."""
    for function, moved in (
        (lambda x: x + 1.0, 800),
        (lambda x: torch._foreach_add_([x], 1.0), 800),
        (lambda x: x + torch.ones(1).expand(100), 400 + 4 + 4 + 400),
    ):
        with Traffic() as traffic:
            function(torch.ones(100))
        assert traffic.bytes - 400 == moved


def test_flops_of_a_grouped_convolution():
    layer = nn.Conv2d(8, 16, 3, padding=1, groups=2, bias=False)
    cost = StepCost()
    with cost.flop_counter:
        layer(torch.ones(2, 8, 6, 5, requires_grad=True)).sum().backward()
    # Forward and twice backward; each output sees 4 inputs of 3 x 3.
    assert cost.flop_counter.get_total_flops() == 3 * (2 * 2 * 16 * 6 * 5 * 4 * 9)


def roofline(peak=100.0, bandwidth=10.0, **changes):
    return Roofline(
        flops=Line(constant=0.0, per_example=200.0),
        bytes=Line(constant=1000.0, per_example=10.0),
        peak=peak,
        bandwidth=bandwidth,
        precision="16-mixed",
        **changes,
    )


def test_the_batch_size_from_which_arithmetic_binds():
    assert round(roofline(312e12, 1555e9).ridge) == 201  # NVIDIA's A100
    # 200 B/(1000 + 10 B) = 10 at B = 100.
    line = roofline()
    assert line.compute_bound_from == pytest.approx(100.0)
    assert line.intensity(100) == pytest.approx(line.ridge)
    assert line.allowed_seconds(50) == pytest.approx(1500 / 10)
    assert line.allowed_seconds(400) == pytest.approx(80_000 / 100)
    assert roofline(bandwidth=4.0).compute_bound_from is None
    timings = [
        Timing(batch_size=size, seconds=500.0, deviation=0.0, visits=2) for size in (50, 400)
    ]
    roof, points, *_ = roofline_figure(line, timings).axes[0].lines
    assert roof.get_ydata() == pytest.approx([min(100.0, 10.0 * x) for x in roof.get_xdata()])
    assert list(points.get_ydata()) == [20.0, 160.0]


def test_tensor_cores_are_spoken_of_where_they_compute():
    layers = nn.Sequential(nn.Linear(64, 50), nn.Linear(50, 2), nn.Linear(64, 64))
    (found,) = paddings(layers)
    assert found == Padding(layer="0", dimension="out_features", size=50)
    assert found.padded == 56
    quiet, spoken = (
        len(list(advice(roofline(paddings=(found,), on_tensor_cores=on), [(8, 200.0)])))
        for on in (False, True)
    )
    assert spoken == quiet + 2


def test_the_ladder_has_both_ends_and_the_baseline():
    for low, high, baseline, multiple in ((4, 1200, 64, 1), (8, 512, 64, 8)):
        sizes = ladder_of(low, high, baseline, multiple)
        assert {low, high, baseline} <= set(sizes) <= set(range(low, high + 1, multiple))
        assert sizes == sorted(sizes)
        assert len(sizes) <= 6


@pytest.mark.parametrize("speedup, chosen", [(1.05, 1), (1.5, 4)])
def test_more_threads_are_chosen_where_they_pay(speedup, chosen):
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        seconds = {1: 1.0, 2: 1.0 / math.sqrt(speedup), 4: 1.0 / speedup}
        assert choose_threads(lambda size, count: seconds[count], [8], lambda: True) == chosen
    finally:
        torch.set_num_threads(before)


def test_unsteady_sizes_are_visited_once_more():
    # 1 is steady, 2 is not, 3 is refused, and for 4 there is no time.
    times = {1: iter([1.0, 1.04]), 2: iter([1.0, 1.1, 1.2]), 3: iter([None])}
    visits, is_whole = visit_in_turns(lambda size: next(times[size]), (1, 2, 3, 4), lambda b: b < 4)
    assert (visits, is_whole) == ({1: [1.0, 1.04], 2: [1.0, 1.1, 1.2]}, False)
    assert visit_in_turns(float, (1, 2), lambda size: True) == ({1: [1.0] * 2, 2: [2.0] * 2}, True)


class Halves(Model):
    """Takes eight megabytes an example, and no odd number of examples."""

    def training_step(self, batch, batch_idx):
        examples = len(batch[0])
        if examples % 2:
            raise ValueError("pairs are needed")
        batch[0][0] += torch.ones(examples, 2_000_000)[0, 0] * 0.0
        return self.loss(batch)


def recipe(module):
    """All measurements get the same data, as those that are given as an object."""
    data = Data()
    return Recipe(lambda trial: module(trial.lr), lambda trial: data, device="cpu", threads=1)


def test_the_flops_of_micro_batches_add_up():
    found = measure_roofline(replace(recipe(Model), micro_batch_size=6), (8, 16), (16, 0.1), 100)
    # 10 products an example, forward and for the weights' gradient.
    assert (found.flops.constant, found.flops.per_example) == pytest.approx((0.0, 40.0))


@pytest.mark.slow
def test_a_survey_within_a_memory_limit(tmp_path):
    halves, length = recipe(Halves), (100, 60.0, 60.0)
    with Worker(tmp_path / "log") as worker:
        one = value_of(call(worker, probe_memory, halves, 16, (16, 0.1), 100, None, limit=60.0))
        limit = int(one.peak + 24 * 8e6)
        found = survey(worker, halves, (1, 80), (16, 0.1), *length, memory_limit=limit)
        with pytest.raises(InputError, match=r" 0 MB: .*memory_limit"):
            survey(worker, halves, (16, 80), (16, 0.1), *length, memory_limit=1000)
        with pytest.raises(UserCodeError, match="pairs"):
            survey(worker, halves, (1, 80), (15, 0.1), *length)
    # The limit is at 40, near which processes that train alike differ.
    assert 28 <= found.largest_fit <= 42
    assert (found.limit, found.threads) == (limit, 1)
    assert found.memory.per_example == pytest.approx(8e6, rel=0.1)
    ladder = ladder_of(1, found.largest_fit, 16)
    # A size on the way to the limit may be odd, too: between 16 and 32 none is rounded.
    refused = [size for size, _ in found.refused if size not in range(17, 32)]
    assert refused == [size for size in ladder if size % 2]
    assert [size for size, *_ in found.step_times] == [size for size in ladder if size % 2 == 0]


KEPT = Survey(
    threads=1, timings=(), largest_fit=64, smallest_unfit=70, limit=1e9, refused=(),
    memory=Line(constant=1e8, per_example=1e6), roofline=roofline(), waited=0.0, whole=True,
    seconds=4.0, allowed=10.0,
)  # fmt: skip


@cases("""
first | refresh | is_kept
{} | false | true
{} | true | false
{waited: 0.3} | false | false
{whole: false} | false | false
""")
def test_what_is_kept(tmp_path, monkeypatch, first, refresh, is_kept):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept, other = (KEPT.model_copy(update=changes) for changes in (first, {"largest_fit": 60}))
    assert cached_survey("key", False, 10.0, lambda: kept) == (kept, False)
    expected = (kept, True) if is_kept else (other, False)
    assert cached_survey("key", refresh, 90.0, lambda: other) == expected
    assert cached_survey("other", False, 90.0, lambda: other) == (other, False)


def test_a_survey_is_of_one_code_and_one_recipe():
    plain, halves = (code_and_layers(recipe(module), 16, 0.1, 100) for module in (Model, Halves))
    assert "pairs are needed" in halves
    assert "pairs are needed" not in plain
    double = Recipe(module=Model, data=Data, precision="64-true")
    of = [
        (plain, recipe(Model), (1, 8)),
        (halves, recipe(Model), (1, 8)),
        (plain, double, (1, 8)),
        (plain, recipe(Model), (1, 9)),
    ]
    assert len({survey_key(code, kept, {}, {}, sizes) for code, kept, sizes in of}) == 4
