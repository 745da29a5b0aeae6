"""Softmax regression on scikit-learn's digits, as a Hydra application that saves and resumes."""

import hydra
import numpy as np
from sklearn.datasets import load_digits


def data():
    images, labels = load_digits(return_X_y=True)
    images = images / 16 - 0.3
    return (images[:1400], labels[:1400]), (images[1400:], labels[1400:])


def logits_and_errors(weights, images, labels):
    logits = images @ weights
    logits -= logits.max(1, keepdims=True)
    log_p = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    errors = np.exp(log_p)
    errors[np.arange(len(labels)), labels] -= 1
    return -log_p[np.arange(len(labels)), labels].mean(), errors


def train(batch_size, lr, seed, max_steps, resume_from=None, save_to=None):
    (images, labels), valid = data()
    first, weights = 0, np.zeros((64, 10))
    if resume_from:
        state = np.load(resume_from)
        first, weights = int(state["step"]), state["weights"]
    history = []
    for step in range(first + 1, max_steps + 1):
        batch = np.random.default_rng([seed, step]).choice(len(images), batch_size, replace=False)
        errors = logits_and_errors(weights, images[batch], labels[batch])[1]
        weights = weights - lr * images[batch].T @ errors / batch_size
        if step % 10 == 0 or step == max_steps:
            history.append((step, logits_and_errors(weights, *valid)[0]))
    if save_to:
        with open(save_to, "wb") as file:
            np.savez(file, step=max_steps, weights=weights)
    # A machine that is always as fast.
    return {"val/loss": history, "seconds": (max_steps - first) * (1e-3 + 1e-5 * batch_size)}


@hydra.main(version_base=None, config_path="conf", config_name="train")
def main(cfg):
    return train(cfg.batch_size, cfg.lr, cfg.seed, cfg.max_steps, cfg.checkpoint, cfg.save_to)


if __name__ == "__main__":
    main()
