"""Gate *training*: precisions, micro-batches, processes and compilation against the plain trial.

    python tests/benchmarks/training.py [--seeds 3]

The project is ``tutorial``, at batch size 60 for 300 steps. A row is a mode and a seed: steps,
whether it was evaluated at the same ones, the last metric, and how far its weights are from the
plain trial's: the largest over tensors of |w - w_plain| / |w_plain|. ``16-mixed`` is with torch's
own scaler on the CPU; where its scale begins so high that the first steps are skipped, the plain
trial begins with the batch after them. Rows of ``memory`` have steps to the target S(B) where each
example takes 4 MB: with all the memory, and with ``micro_batch_size=auto``'s choice under a
``memory_limit`` of a quarter of what the largest size needs.
"""

import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from common import add_rows, jobs_of, parser, read_rows
from lightning.pytorch import Callback
from lightning.pytorch.plugins import MixedPrecision
from projects import PROJECTS

from bstune.core.records import Spec, Target
from bstune.hardware.survey import survey
from bstune.recipe.recipe import Recipe
from bstune.trial.lightning import train
from bstune.trial.ranks import Ranks
from bstune.trial.trial import Trial, run_trial
from bstune.trial.worker import Worker, call, value_of

Module, Data = PROJECTS["tutorial"].classes
BATCH_SIZE = 60
STEPS = 300
LR = 0.2
NEVER = Target("val_loss", 0.0, "min")
MODES = {
    "repeated": {},
    "micro-batches of 20": {"micro_batch_size": 20},
    "micro-batches of 25": {"micro_batch_size": 25},
    "two processes": {"devices": 2},
    "two processes, micro-batches of 7": {"devices": 2, "micro_batch_size": 7},
    "compile": {"compile": "default"},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "bf16-true": {"precision": "bf16-true"},
    "16-mixed": {"precision": None},
    "16-mixed, steps skipped": {"precision": None},
}
SCALES = {"16-mixed": 2.0**10, "16-mixed, steps skipped": 2.0**30}
# Steps to the target, at batch sizes of which the last one takes 2 GB.
SIZES = (32, 128, 512)
TARGET = Target("val_loss", 0.2, "min")
MOST = 4000
LARGE_STEPS = 20
SECONDS = 120.0


class Seen(Callback):
    """Counts batches, and keeps the weights; the first ones of the data may be left out."""

    def __init__(self, left_out=0):
        self.left_out = left_out
        self.batches = 0

    def on_train_start(self, trainer, module):
        trainer.train_dataloader.batch_sampler.seek(self.left_out)

    def on_train_batch_end(self, *arguments):
        self.batches += 1

    def on_train_end(self, trainer, module):
        self.weights = {name: value.float() for name, value in module.state_dict().items()}


class Large(Module):
    """Each example takes 4 MB in the first steps; in all of them it would take minutes."""

    def training_step(self, batch, batch_idx):
        if self.trainer.global_step < LARGE_STEPS:
            batch[0][0] += torch.ones(len(batch[0]), 1_000_000)[0, 0] * 0.0
        return super().training_step(batch, batch_idx)


def recipe_of(module, seen, scaler=None, **options):
    def arguments(trial):
        scaled = [MixedPrecision("16-mixed", "cpu", scaler)] if scaler else []
        return {"callbacks": [seen], "plugins": scaled}

    plain = Recipe(
        lambda trial: module(trial.lr), lambda trial: Data(), arguments, device="cpu", threads=1
    )
    return replace(plain, **options)


def trained(recipe, seen, seed, target=NEVER, batch_size=BATCH_SIZE, steps=STEPS):
    """Train a trial; its record, and what was seen of it."""
    spec = Spec(
        number=0, place="", role="search", batch_size=batch_size, lr=LR, seed=seed, max_steps=steps
    )
    trial = Trial(spec, target, total_steps=steps)
    return run_trial(partial(train, recipe), trial), seen


def in_mode(mode, seed):
    """Train as a mode says."""
    scaler = None
    if mode in SCALES:
        # Few skips, none of them after the first step.
        scaler = torch.amp.GradScaler("cpu", SCALES[mode], backoff_factor=2.0**-4)
    return trained(recipe_of(Module, seen := Seen(), scaler, **MODES[mode]), seen, seed)


def measure(mode, seed):
    """A mode, beside the plain trial."""
    if MODES[mode].get("devices"):
        with tempfile.TemporaryDirectory() as folder, Ranks(Path(folder) / "log", 2) as ranks:
            record, seen = value_of(call(ranks, in_mode, mode, seed, limit=SECONDS))
    else:
        record, seen = in_mode(mode, seed)
    skipped = seen.batches - record.steps if mode in SCALES else 0
    plain, of_plain = trained(recipe_of(Module, left := Seen(skipped)), left, seed)
    differences = [
        float((seen.weights[name] - weights).norm() / weights.norm())
        for name, weights in of_plain.weights.items()
    ]
    evaluated = [[step for step, _ in one.history] for one in (record, plain)]
    return {
        "steps": record.steps,
        "plain_steps": plain.steps,
        "batches": seen.batches,
        "evaluated_alike": evaluated[0] == evaluated[1],
        "difference": max(differences),
        "metric": record.history[-1][1],
        "plain_metric": plain.history[-1][1],
    }


def measure_memory(memory, seed):
    """S(B) with all the memory, and with a quarter of what the largest size needs."""
    baseline = (SIZES[0], LR)
    whole = recipe_of(Large, Seen())
    with tempfile.TemporaryDirectory() as folder, Worker(Path(folder) / "log") as worker:
        ask = partial(survey, worker, whole, (1, SIZES[-1]), baseline, STEPS, SECONDS, SECONDS)
        needed = ask().memory(SIZES[-1])
        limit = int(needed * memory)
        fits = ask(memory_limit=limit).largest_fit
    rows = {}
    for size in SIZES:
        rows[size] = []
        for micro_batch_size in (None, fits):
            seen = Seen()
            recipe = recipe_of(Large, seen, micro_batch_size=micro_batch_size)
            record, _ = trained(recipe, seen, seed, TARGET, size, MOST)
            rows[size].append((record.status, record.steps, seen.batches))
    return {"needed": needed, "limit": limit, "micro_batch_size": fits, "sizes": rows}


def main():
    given = parser(__doc__, "training.jsonl", seeds=3).parse_args()
    seeds = range(given.seeds)
    add_rows(given, jobs_of(mode=MODES, seed=seeds), measure)
    add_rows(given, jobs_of(memory=[0.25], seed=seeds), measure_memory)
    rows = read_rows(given.rows)
    for mode in MODES:
        of_mode = [row for row in rows if row.get("mode") == mode]
        for row in of_mode:
            print(
                f"{mode}, seed {row['seed']}: {row['steps']} of {row['plain_steps']} steps, "
                f"{row['batches']} batches, evaluated alike {row['evaluated_alike']}; weights "
                f"{row['difference']:.1e} off; {row['metric']:.4f} for {row['plain_metric']:.4f}"
            )
    for row in rows:
        if "memory" in row:
            limits = f"{row['limit'] / 1e6:,.0f} of {row['needed'] / 1e6:,.0f} MB"
            print(f"{limits}, micro-batches of {row['micro_batch_size']}, seed {row['seed']}:")
            for size, (plain, limited) in row["sizes"].items():
                print(f"  S({size}) = {limited[1]} in {limited[2]} batches; without {plain[1]}")


if __name__ == "__main__":
    main()
