"""What the loops train: scikit-learn's digits, a network with one hidden layer, and its loss on held-out images."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

IMAGES, LABELS = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
IMAGES = IMAGES.float() / 16
TRAIN = IMAGES[:1200], LABELS[:1200]
VAL = IMAGES[1200:1500], LABELS[1200:1500]


def make_model():
    return nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))


def validate(model):
    images, labels = VAL
    with torch.no_grad():
        return cross_entropy(model(images), labels).item()
