"""Black images in a workload's shape, and a text, as on fake tensors nothing depends on what they show; and a fault."""

from collections.abc import Sequence
from typing import Any

import lightning.pytorch
import numpy as np

from bstune.workloads.datasets import ImageDataset, Images
from bstune.workloads.language import Text

TEST_EXAMPLES = 2048


def made_images(shape: Sequence[int], examples: int) -> ImageDataset:
    """A data set of 10 classes, images (examples, channels, height, width)."""

    def images(count: int) -> Images:
        return Images(np.zeros((count, *shape), np.uint8), np.arange(count) % 10)

    return ImageDataset("made", 255, images(examples), images(TEST_EXAMPLES))


def made_text(vocabulary: int) -> Text:
    """A text whose tokens come one after another."""
    # 100,000 are enough for any workload's sequences.
    tokens = (np.arange(100_000) % vocabulary).astype(np.uint8)
    return Text("made", vocabulary, tokens, tokens, None)


class Reader(lightning.pytorch.Callback):
    """Reads every step's loss, as trials must not."""

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        float(outputs["loss"])
