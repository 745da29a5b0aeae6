"""An application of Hydra that knows nothing of bstune: ``python train.py -m hparams_search=bstune``."""

import os
import signal
import sys
import time
from pathlib import Path

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from projects.own_loop.digits import TRAIN, make_model, validate
from torch.nn.functional import cross_entropy

# Later versions of Hydra have one behaviour.
VERSION_BASE = {"version_base": "1.3"} if hydra.__version__.startswith("1.3.") else {}


def _raise():
    raise RuntimeError("no room for this")


FAILURES = {
    "error": _raise,
    "exit": lambda: sys.exit(3),
    "process": lambda: os._exit(1),
    "None": lambda: None,
}


@hydra.main(**VERSION_BASE, config_path="conf", config_name="train")
def main(config):
    torch.manual_seed(config.seed)
    model = make_model()
    optimizer = getattr(torch.optim, config.optimizer.name)(
        model.parameters(), lr=config.optimizer.lr
    )
    step = 0
    history = []
    if config.resume_from is not None:
        saved = torch.load(config.resume_from)
        model.load_state_dict(saved["model"])
        step = saved["step"]
    if config.kill_when_continued and step > 0:
        os.kill(os.getpid(), signal.SIGKILL)
    images, labels = TRAIN
    size = config.data.batch_size
    seconds = 0.0
    limit = config.max_steps or -(-config.examples // size)
    if config.linear:
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, limit)
    order = torch.Generator().manual_seed(config.seed + step)
    while step < limit:
        began = time.perf_counter()
        for _ in range(min(5, limit - step)):
            batch = torch.randint(len(images), (size,), generator=order)
            loss = cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if config.linear:
                schedule.step()
            step += 1
        seconds += time.perf_counter() - began
        history.append((step, validate(model)))
        if history[-1][1] <= config.goal:
            break
    places = [config.save_to]
    if config.save_in_output is not None:
        places.append(Path(HydraConfig.get().runtime.output_dir, config.save_in_output))
    for place in filter(None, places):
        torch.save({"model": model.state_dict(), "step": step}, place)
    if HydraConfig.get().job.get("num") == config.fails_in_job is not None:
        return FAILURES[config.fails_by]()
    if config.returns == "history":
        taken = len(history) * 5
        return {"history": history, "seconds_per_step": seconds / taken}
    if config.returns == "metric":
        return history[-1][1]
    if config.returns == "steps":
        return step if history[-1][1] <= config.goal else float("inf")
    if config.returns == "error":
        _raise()
    return {
        "None": None,
        "text": "0.5",
        "not_finite": float("nan"),
        "other": {"loss": 1.0},
        "lost": {"history": [(10, None)], "seconds_per_step": None},
    }[config.returns]


if __name__ == "__main__":
    main()
