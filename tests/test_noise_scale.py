import atexit
import collections
import copy
import json
import math
import random
from types import MappingProxyType, SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from scipy.stats import t as student
from toolbox import measured_steps
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.aggregation import MeanMetric

from bstune.core.errors import ConfigError
from bstune.core.noise_scale import GradientNorms, combine_norms, estimate_noise_scale
from bstune.trial.batches.accumulation import weight_micro_batches
from bstune.trial.noise_scale import NoiseScale, count_examples, cut_batch

# Advice of Lightning's that does not concern a toy.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*num_workers.*", "ignore:.*(returned `None`|logging interval|not resumable).*"
)

EXACT = {"rel": 1e-12}


# --------------------------------------------------------------------------------------------------
# -- arithmetic


# Of groups of unequal sizes B_small is the mean size: 19/3.
@pytest.mark.parametrize(("sizes", "small_size"), [((1, 1), 1), ((8, 8), 8), ((8, 8, 3), 19 / 3)])
def test_expected_norms_give_back_both_terms(sizes, small_size):
    """E|g|^2 = |G|^2 + tr(Sigma)/n of n examples, here with |G|^2 = 2 and tr Sigma = 30."""
    # By their expectations alone, without an error of sampling.
    squared_norms = 2 + 30 / np.array(sizes)
    norms = combine_norms(squared_norms.tolist(), sizes, 2 + 30 / sum(sizes))
    assert (norms.squared_gradient, norms.trace) == (
        pytest.approx(2.0, **EXACT),
        pytest.approx(30.0, **EXACT),
    )
    assert (norms.small_size, norms.big_size) == (
        pytest.approx(small_size),
        pytest.approx(sum(sizes)),
    )


@pytest.mark.parametrize("sizes", [(4, 4), (8, 8, 8, 3)])
def test_the_trace_is_the_textbooks_pooled_variance_between_groups(sizes):
    n = np.array(sizes, float)
    # 500 steps of groups of four-dimensional gradients.
    gradients = np.random.default_rng(0).normal(1.0, 2.0, size=(500, len(n), 4))
    means = np.einsum("i,sid->sd", n / n.sum(), gradients)
    steps = zip((gradients**2).sum(axis=2), (means**2).sum(axis=1), strict=True)
    traces = [combine_norms(norms, sizes, big).trace for norms, big in steps]
    # One-way analysis of variance: sum n_i |g_i - g|^2/(k - 1).
    pooled = np.einsum("i,sid->s", n, (gradients - means[:, None]) ** 2) / (len(n) - 1)
    np.testing.assert_allclose(traces, pooled, rtol=1e-9, atol=1e-12)
    assert min(traces) >= 0.0


def random_terms(seed, mean, steps):
    rng = np.random.default_rng(seed)
    # A normal |G|^2 that may be near 0, and a trace that is positive.
    return rng.normal(mean, 1.0, steps), rng.gamma(9.0, 1.0, steps)


# In any unit: the smallest would underflow when it is squared.
@pytest.mark.parametrize("unit", [1.0, 1e-200])
@pytest.mark.parametrize(
    ("seed", "mean", "steps"), [(0, 1.0, 12), (1, 3.0, 16), (2, 0.2, 16), (3, -0.1, 9)]
)
def test_at_the_ends_of_the_interval_the_t_test_is_at_its_level(seed, mean, steps, unit):
    gradients, traces = random_terms(seed, mean, steps)
    found = estimate_noise_scale(gradients * unit, traces, level=0.8)
    # Where it is undetermined, there is still a lower end.
    assert (found.noise_scale is not None) == (mean >= 1.0)
    assert (found.high is not None) == (mean >= 1.0)
    for end in (found.low, found.high):
        if end is not None:
            difference = traces - end * unit * gradients
            # Fieller: at an end B the mean of trace - B |G|^2 is just significant.
            statistic = abs(difference.mean()) / (difference.std(ddof=1) / math.sqrt(steps))
            # Both sides of an interval of 80%.
            assert statistic == pytest.approx(student.ppf(0.9, steps - 1), rel=1e-9)
    if found.noise_scale is not None:
        assert found.noise_scale == pytest.approx(traces.mean() / gradients.mean() / unit)
        assert found.low < found.noise_scale < found.high


def test_many_steps_are_blocked_so_that_a_drift_widens_the_interval():
    gradients, traces = random_terms(0, 10.0, 320)
    # The trace triples over 320 steps.
    drift = np.linspace(0.5, 1.5, 320)
    shuffled = np.random.default_rng(0).permutation(320)
    drifting = estimate_noise_scale(gradients, traces * drift)
    mixed = estimate_noise_scale(gradients, (traces * drift)[shuffled])
    assert drifting.noise_scale == pytest.approx(mixed.noise_scale)
    # In another order the same numbers have a narrower interval.
    assert drifting.high - drifting.low > 2 * (mixed.high - mixed.low)
    # The oldest steps that fill no block are left out.
    extra = estimate_noise_scale([99.0, *gradients[:33]], [99.0, *traces[:33]])
    assert (extra.squared_gradient, extra.measurements) == (
        pytest.approx(gradients[:33].mean()),
        34,
    )


NOT_SIGNIFICANT = (
    "|G|^2 = {} does not differ significantly from 0 after 8 steps: measure more of them"
)


@pytest.mark.parametrize(
    ("gradients", "traces", "reason"),
    [
        ([], [], "no step was measured"),
        # Below 4 there is no interval worth a name.
        ([1.0] * 3, [2.0] * 3, "3 of at least 4 steps were measured"),
        # A negative estimate of a square, and one with a large scatter.
        ([-1.0, -1.1] * 4, [2.0, 2.1] * 4, NOT_SIGNIFICANT.format(-1.05)),
        ([5.0, -4.0] * 4, [2.0, 2.1] * 4, NOT_SIGNIFICANT.format(0.5)),
    ],
)
def test_undetermined_says_so_and_leaves_the_ends_open(gradients, traces, reason):
    found = estimate_noise_scale(gradients, traces)
    assert (found.noise_scale, found.high, found.undetermined) == (None, None, reason)
    assert f"undetermined ({reason})" in str(found)
    assert "inf" not in str(found)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            # B_small must be smaller than B_big.
            lambda: GradientNorms(1, 4, 1, 4),
            "0 < B_small < B_big, but got 4 and 4: measure at least two",
        ),
        (lambda: combine_norms([1], [8], 1), "two or more micro-batches .* but got sizes .8.0.:"),
        (lambda: combine_norms([1, 1], [8, 0], 1), "but got sizes .8.0, 0.0.:"),
        (lambda: estimate_noise_scale([1], [1], 1.0), r"must lie in [(]0, 1[)], but got 1.0"),
    ],
)
def test_arithmetic_refuses(call, message):
    with pytest.raises(ConfigError, match=message):
        call()


# --------------------------------------------------------------------------------------------------
# ---- call-back


class Recorder(DummyLogger):
    def __init__(self):
        super().__init__()
        self.lines = []

    def log_metrics(self, metrics, step):
        self.lines.append((step, dict(metrics)))

    def logged(self, noise_scale):
        """The lines of the noise scale, or the others."""
        found = []
        for step, metrics in self.lines:
            is_of_noise_scale = any("noise_scale" in name for name in metrics)
            if is_of_noise_scale == noise_scale:
                found.append((step, metrics))
        return found


def fit(module, batches, callback=None, **options):
    options = {"accelerator": "cpu", "logger": False, "max_epochs": 1, **options}
    quiet = {
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = Trainer(**quiet, **options, callbacks=[] if callback is None else [callback])
    trainer.fit(module, batches, ckpt_path=None)
    return trainer


def measure(module, batches, accumulate=1, every=1, **options):
    """Train a module and return the call-back that measured."""
    callback = NoiseScale(every=every)
    fit(module, batches, callback, accumulate_grad_batches=accumulate, **options)
    return callback


class Regression(LightningModule):
    """Least squares at weights that stay where they are."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-0.5, 0.7, 4, dtype=torch.float64))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return 0.5 * ((x @ self.weight - y) ** 2).mean()

    def configure_optimizers(self):
        # The weights stay where they are, so that every step measures the same gradient.
        return torch.optim.SGD([self.weight], lr=0.0)


def regression_data(n=128):
    generator = torch.Generator().manual_seed(0)
    # The noise of y has a standard deviation of 2.
    x = torch.randn(n, 4, generator=generator, dtype=torch.float64)
    return x, x.sum(1) + 2 * torch.randn(n, generator=generator, dtype=torch.float64)


def drawn(sizes, steps, seed=0):
    """A loader of micro-batches of examples drawn with replacement."""
    x, y = regression_data()
    generator = torch.Generator().manual_seed(seed)
    micro_batches = []
    for _ in range(steps):
        for size in sizes:
            indices = torch.randint(len(x), (size,), generator=generator)
            micro_batches.append((x[indices], y[indices]))
    return serve(micro_batches)


def serve(batches):
    """A loader of these batches: a plain list would be several loaders to Lightning."""
    return DataLoader(list(batches), batch_size=None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "parts", "weights"),
    [
        # A batch that is split, and micro-batches with and without a smaller last one.
        ((31,), 3, "equal"),
        ((8,) * 4, 2, "equal"),
        ((16, 16, 5), 2, "equal"),
        ((16, 16, 5), 2, "examples"),
    ],
)
def test_linear_regression_recovers_what_all_data_give(sizes, parts, weights):
    x, y = regression_data()
    module = Regression()
    with torch.no_grad():
        # Of each example (x w - y) x.
        gradients = (x * (x @ module.weight - y)[:, None]).numpy()
    squared = (gradients.mean(axis=0) ** 2).sum()
    # tr Sigma is the sum of the variances.
    trace = gradients.var(axis=0).sum()
    if weights == "examples":
        weight_micro_batches(module, sizes, sum(sizes))
    callback = NoiseScale(every=1, parts=parts, window=150, level=0.99, weights=weights)
    fit(module, drawn(sizes, 150), callback, accumulate_grad_batches=len(sizes))
    steps, *terms = np.array(callback.measurements).T
    assert steps.tolist() == list(range(1, 151))
    for found, exact in zip(terms, (squared, trace), strict=True):
        # Four standard errors of 150 steps.
        assert found.mean() == pytest.approx(exact, abs=4 * found.std() / math.sqrt(150))
    found = callback.estimate
    assert found.low < trace / squared < found.high
    # The interval says something.
    assert found.high < 3 * found.low
    assert callback.passed_over == 0


def test_both_ways_measure_the_same_step_the_same_and_before_its_gradient_is_clipped():
    # Five steps of 20 examples, and the same in halves.
    batches = drawn((20,), 5)
    halves = []
    for x, y in batches:
        halves += zip(x.split(10), y.split(10), strict=True)
    # It would be a thousandth.
    split = measure(Regression(), batches, gradient_clip_val=1e-3)
    accumulated = measure(Regression(), serve(halves), 2)
    clipped = measure(Regression(), serve(halves), 2, gradient_clip_val=1e-3)
    np.testing.assert_allclose(split.measurements, accumulated.measurements, rtol=1e-10)
    assert clipped.measurements == accumulated.measurements


class Everything(LightningModule):
    """Batch norm, dropout, metrics, counters, generators and logging: what a second pass could disturb."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1)
        )
        self.mean = MeanMetric()
        self.seen = 0
        self.losses = []
        self.counts = collections.Counter()
        self.own = torch.Generator().manual_seed(3)
        self.total = torch.zeros(1)
        # The encoder follows the trained one.
        self.momentum = copy.deepcopy(self.body).requires_grad_(False)

    def training_step(self, batch, batch_idx):
        x, y = batch
        # Noise by the module's own generator, by Python's and by NumPy's.
        x = (
            x
            + 0.01 * torch.randn(x.shape, generator=self.own)
            + 0.01 * random.gauss(0, 1)
            + 0.01 * np.random.rand()
        )
        for one, other in zip(self.momentum.parameters(), self.body.parameters(), strict=True):
            one.data.lerp_(other.data, 0.1)
        loss = ((self.body(x)[:, 0] - y - 0.1 * self.momentum(x)[:, 0]) ** 2).mean()
        self.seen += len(x)
        self.losses.append(float(loss.detach()))
        self.counts["steps"] += 1
        self.total += loss.detach()
        self.mean(loss.detach())
        self.log("loss", loss)
        self.log_dict({"mean": self.mean})
        self.logger.log_metrics({"direct": self.seen}, step=batch_idx)
        return {"loss": loss}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def everything_that_is_left(callback, accumulate):
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    module = Everything()
    recorder = Recorder()
    generator = torch.Generator().manual_seed(5)
    # 95 examples make nine batches of 10 and one of 5.
    data = TensorDataset(
        torch.randn(95, 6, generator=generator), torch.randn(95, generator=generator)
    )
    loader = DataLoader(data, batch_size=10, shuffle=True)
    trainer = fit(
        module, loader, callback, max_epochs=2, accumulate_grad_batches=accumulate,
        logger=recorder, log_every_n_steps=1, gradient_clip_val=0.5,
    )  # fmt: skip
    state = copy.deepcopy({**module.state_dict(), **trainer.optimizers[0].state_dict()})
    state |= {
        "grad": [p.grad for p in module.parameters()],
        "own": module.own.get_state(),
        "total": module.total,
    }
    state |= {
        "torch": torch.get_rng_state(),
        "mean": module.mean.mean_value,
        "updates": module.mean._update_count,
    }
    rest = (
        random.getstate(),
        np.random.rand(),
        module.seen,
        module.losses,
        module.counts,
        recorder.logged(False),
    )
    # What was patched in is taken out.
    assert "log" not in vars(module)
    for parameter in module.parameters():
        assert not parameter._backward_hooks
    return state, rest, recorder


@pytest.mark.parametrize("accumulate", [1, 3])
def test_training_is_the_same_bit_for_bit_with_and_without(accumulate):
    state, rest, _ = everything_that_is_left(None, accumulate)
    callback = NoiseScale(every=1)
    same, same_rest, recorder = everything_that_is_left(callback, accumulate)
    torch.testing.assert_close(same, state, rtol=0, atol=0)
    assert str(same_rest) == str(rest)
    assert len(callback.measurements) == len(recorder.logged(True))
    # Ten batches an epoch, in threes: the last is left over.
    assert (len(callback.measurements), callback.passed_over) == (
        (20, 0) if accumulate == 1 else (6, 2)
    )


def test_logs_the_moving_estimate_at_the_steps_that_are_measured():
    recorder = Recorder()
    callback = NoiseScale(every=3, window=8)
    fit(Regression(), drawn((64,), 50), callback, logger=recorder)
    assert [step for step, _ in recorder.logged(True)] == list(range(3, 50, 3))
    terms = {"noise_scale_squared_gradient", "noise_scale_trace"}
    assert set(recorder.logged(True)[0][1]) == terms
    estimate = callback.estimate
    (_, last) = recorder.logged(True)[-1]
    assert set(last) == terms | {"noise_scale", "noise_scale_low", "noise_scale_high"}
    assert (last["noise_scale"], last["noise_scale_low"]) == (estimate.noise_scale, estimate.low)
    # Of 16 measurements the window holds the last 8.
    assert (estimate.measurements, len(callback.measurements)) == (8, 16)
    late = np.array(callback.measurements)[-8:]
    assert estimate.noise_scale == pytest.approx(late[:, 2].mean() / late[:, 1].mean())


@pytest.mark.parametrize(
    ("batches", "accumulate", "parts", "expected"),
    # 128 steps for each part of a batch that is split; 32 where micro-batches are there anyway.
    [(400, 1, 3, [384]), (150, 2, 2, [32, 64])],
)
def test_default_interval(batches, accumulate, parts, expected):
    callback = NoiseScale(parts=parts)
    fit(Regression(), drawn((6,), batches), callback, accumulate_grad_batches=accumulate)
    assert measured_steps(callback.measurements) == expected


class Narrow(Regression):
    """In float32, with a step that takes no batch index."""

    def __init__(self):
        super().__init__()
        self.float()

    def training_step(self, batch):
        x, y = batch
        return super().training_step([x.float(), y.float()], 0)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_gradient_scaler_is_taken_out_and_an_overflow_passed_over(accumulate):
    # In float16 512 is a fine scale, and 2^100 is infinite.
    def train(scale):
        precision = {}
        if scale is not None:
            scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000)
            precision = {"plugins": MixedPrecision("16-mixed", "cpu", scaler)}
        return measure(Narrow(), drawn((32,), 4 * accumulate), accumulate, **precision)

    plain = train(None)
    scaled = train(2.0**9)
    overflown = train(2.0**100)
    # float16 has three digits.
    np.testing.assert_allclose(scaled.measurements, plain.measurements, rtol=0.05, atol=0.02)
    assert (len(overflown.measurements), overflown.passed_over) == (0, 4)


# Lost in one batch of 8: nan, infinite, too large to square, or no loss at all.
@pytest.mark.parametrize(
    ("bad", "accumulate"), [(math.nan, 1), (math.inf, 2), (3e153, 1), (None, 1), (None, 2)]
)
def test_a_step_without_a_finite_gradient_is_passed_over_and_counted(bad, accumulate):
    """The squared norms of one times 3e153 are finite still, but not when they are multiplied by the batch size."""

    class Faulty(Regression):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            if batch_idx != 3:
                return loss
            return None if bad is None else loss * bad

        def on_before_optimizer_step(self, optimizer):
            if self.weight.grad is not None:
                self.weight.grad.nan_to_num_(0.0, 0.0, 0.0)

    callback = measure(Faulty(), drawn((8,), 8), accumulate)
    # Lightning counts a step without gradient all the same.
    missed = 4 // accumulate
    steps = [step for step in range(1, 8 // accumulate + 1) if step != missed]
    assert measured_steps(callback.measurements) == steps
    assert callback.passed_over == 1
    assert np.isfinite(callback.measurements).all()
    again = NoiseScale()
    again.load_state_dict(json.loads(json.dumps(callback.state_dict())))
    assert (again.measurements, again.passed_over) == (callback.measurements, 1)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_parameters_may_have_no_gradient_no_optimizer_or_a_shared_gradient(accumulate):
    class More(Regression):
        def __init__(self):
            super().__init__()
            self.weight.data /= 2
            # It has the gradient of weight, so both terms are twice as large.
            self.other = nn.Parameter(self.weight.detach().clone())
            # Unused, and one that no optimizer has.
            self.unused = nn.Parameter(torch.ones(3))
            self.apart = nn.Parameter(torch.ones(1, dtype=torch.float64))

        def training_step(self, batch, batch_idx):
            x, y = batch
            return 0.5 * ((x @ (self.weight + self.other) - y) ** 2).mean() + self.apart.sum()

        def configure_optimizers(self):
            return torch.optim.SGD([self.weight, self.other, self.unused], lr=0.0)

    more = measure(More(), drawn((8,), 4), accumulate)
    plain = measure(Regression(), drawn((8,), 4), accumulate)
    np.testing.assert_allclose(
        # Step, |G|^2 and trace: both twice as large.
        more.measurements,
        np.array(plain.measurements) * [1, 2, 2],
        rtol=1e-10,
    )


class Local(Regression):
    """Has a part of the data on each device, and writes down what the first one measured."""

    path = None

    def train_dataloader(self):
        x, y = regression_data(32)
        # Rank 0 has the even examples, rank 1 the odd ones.
        of_this_rank = slice(self.trainer.global_rank, None, 2)
        x = x[of_this_rank]
        y = y[of_this_rank]
        return DataLoader(TensorDataset(x, y), batch_size=4)

    def on_train_end(self):
        callbacks = self.trainer.callbacks
        (callback,) = (one for one in callbacks if isinstance(one, NoiseScale))
        if self.trainer.is_global_zero:
            self.path.write_text(json.dumps(callback.measurements))

    def teardown(self, stage):
        # The threads of gloo abort a process that leaves them.
        atexit.register(torch.distributed.destroy_process_group)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_several_devices_are_read_before_their_gradients_are_reduced(tmp_path):
    """Two processes, two micro-batches each: as one device with the same four."""
    x, y = regression_data(32)
    module = Local()
    module.path = tmp_path / "measured"
    two = {"strategy": "ddp_fork", "devices": 2, "use_distributed_sampler": False}
    fit(module, None, NoiseScale(every=1), accumulate_grad_batches=2, **two)
    micro_batches = []
    for first in range(0, 16, 4):
        # Each device has every second example.
        for rank in (0, 1):
            part = slice(first, first + 4)
            micro_batches.append((x[rank::2][part], y[rank::2][part]))
    alone = measure(Regression(), serve(micro_batches), 4)
    # 32 examples on two devices, two micro-batches of 4 on each a step: two steps of 16.
    assert len(alone.measurements) == 2
    np.testing.assert_allclose(json.loads(module.path.read_text()), alone.measurements, rtol=1e-9)


Pair = collections.namedtuple("Pair", ["x", "y"])


@pytest.mark.parametrize(
    ("batch", "first"),
    [
        (torch.arange(5), lambda part: part),
        ([torch.arange(5), list("abcde")], lambda part: part[0]),
        ({"x": torch.arange(5), "more": {"y": torch.zeros(5, 2)}}, lambda part: part["x"]),
        (Pair(torch.arange(5), torch.zeros(5)), lambda part: part.x),
        # Features of other kinds give such empty parts.
        (([torch.arange(5)], [], {}), lambda part: part[0][0]),
        (collections.UserDict(x=torch.arange(5), more=list("abcde")), lambda part: part["x"]),
        (collections.defaultdict(list, x=torch.arange(5)), lambda part: part["x"]),
        (collections.OrderedDict(x=torch.arange(5)), lambda part: part["x"]),
    ],
)
def test_splits_along_dimension_0(batch, first):
    assert count_examples(batch) == 5
    small, large = cut_batch(batch, 2)
    assert type(small) is type(large) is type(batch)
    assert first(small).tolist() == [0, 1]
    assert first(large).tolist() == [2, 3, 4]
    assert (count_examples(small), count_examples(large)) == (2, 3)
    # More parts than examples: one each.
    assert len(cut_batch(batch, 9)) == 5


def test_a_mapping_that_cannot_be_written_to_is_split_into_dicts():
    first, second = cut_batch(MappingProxyType({"x": torch.arange(3)}), 2)
    # A proxy of a mapping cannot be built from a dict.
    assert (type(first), first["x"].tolist(), second["x"].tolist()) == (dict, [0], [1, 2])


@pytest.mark.parametrize(
    ("batch", "found"),
    [
        # A single number has no dimension to cut.
        (torch.tensor(1.0), "batch is or holds a tensor without dimensions"),
        ((torch.zeros(4), torch.zeros(3)), "batch is or holds tensors of lengths 3, 4"),
        ((torch.zeros(4), 7), "batch[1] is or holds int"),
        ({"x": torch.zeros(4), "graph": object()}, "batch['graph'] is or holds object"),
        ((), "batch is or holds no tensor"),
    ],
)
def test_refuses_batches_that_cannot_be_split(batch, found):
    with pytest.raises(ConfigError) as error:
        cut_batch(batch, 2)
    assert found in str(error.value)
    assert "make the batch of tensors of one length" in str(error.value)


class Manual(Narrow):
    automatic_optimization = False


class Iterating(Narrow):
    def training_step(self, dataloader_iter):
        return super().training_step(next(dataloader_iter)[0])


@pytest.mark.filterwarnings("ignore:.*dataloader_iter.*")
@pytest.mark.parametrize(
    ("module", "size", "message"),
    [
        (Manual, 8, "Manual steps its optimizers itself [(]manual optimization[)]"),
        (Iterating, 8, "Iterating.training_step takes dataloader_iter"),
        # Half of one example is none.
        (Narrow, 1, "a batch of 1 example cannot be split .* take a larger batch, or accumulate"),
    ],
)
def test_refuses_in_training(module, size, message):
    callback = NoiseScale(every=1)
    with pytest.raises(ConfigError, match=message):
        fit(module(), drawn((size,), 4), callback)
    assert callback._reading is None


def test_refuses_a_strategy_that_shards_gradients():
    # The name is what is told.
    class Sharded:
        pass

    trainer = SimpleNamespace(strategy=Sharded())
    with pytest.raises(
        ConfigError,
        match="the strategy is Sharded: train on a single device or with strategy='ddp'",
    ):
        NoiseScale().setup(trainer, Narrow(), "fit")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"every": 0}, "the noise scale's every must be a positive integer, but got 0"),
        ({"every": 1.5}, "the noise scale's every must be a positive integer, but got 1.5"),
        ({"parts": 1}, "the noise scale's parts must be at least 2, but got 1"),
        # An interval needs four measurements.
        ({"window": 3}, "the noise scale's window must be at least 4, but got 3"),
        ({"level": 0.0}, "the level of the noise scale's interval must lie in (0, 1), but got 0.0"),
        (
            {"weights": "size"},
            "the noise scale's weights must be equal or examples, but got 'size'",
        ),
    ],
)
def test_refuses_settings(setting, message):
    with pytest.raises(ConfigError) as error:
        NoiseScale(**setting)
    assert str(error.value) == message


def test_the_last_small_batch_of_an_epoch_is_passed_over():
    # A batch of one at the end of an epoch cannot be split.
    callback = measure(Regression(), serve([*drawn((8,), 3), *drawn((1,), 1)]))
    assert (len(callback.measurements), callback.passed_over) == (3, 1)
