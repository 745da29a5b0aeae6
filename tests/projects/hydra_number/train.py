"""A Hydra application with a config for hydra-optuna-sweeper; its job returns one number."""

import math
from signal import SIGINT, raise_signal

import hydra


@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(cfg):
    size, lr = cfg.data.batch_size, cfg.optimizer.lr
    if cfg.fault == "memory" and size > 100:
        raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB")
    if cfg.fault == "raise":
        raise ValueError("no such column")
    if cfg.fault == "interrupt":
        raise_signal(SIGINT)
    if lr > 0.3:
        return math.nan
    off = math.log2(lr / (0.1 * math.sqrt(size / 64)))
    loss = 0.5 + 0.02 * off**2 + 0.01 * abs(math.log2(size / 128))
    return loss + (cfg.model.dropout - 0.2) ** 2 + 0.005 * math.sin(cfg.seed)


if __name__ == "__main__":
    main()
