"""Lightning's names as bstune uses them.

They are those of ``lightning``, or of ``pytorch_lightning`` where that alone is installed. A user's
module may be of the other package all the same: see :mod:`bstune.trial.lightning.packages`.
"""

from typing import TYPE_CHECKING

from bstune.system.lightning_package import DEFAULT, installed_lightning

if TYPE_CHECKING or installed_lightning() == DEFAULT:
    from lightning.fabric.utilities import move_data_to_device
    from lightning.fabric.utilities.data import sized_len
    from lightning.pytorch import (
        Callback,
        LightningDataModule,
        LightningModule,
        Trainer,
        seed_everything,
    )
    from lightning.pytorch.callbacks import WeightAveraging
    from lightning.pytorch.loggers.logger import DummyLogger
    from lightning.pytorch.profilers import PassThroughProfiler
    from lightning.pytorch.utilities.combined_loader import CombinedLoader
    from lightning.pytorch.utilities.memory import garbage_collection_cuda, is_oom_error
    from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
else:
    from lightning_fabric.utilities import move_data_to_device
    from lightning_fabric.utilities.data import sized_len
    from pytorch_lightning import (
        Callback,
        LightningDataModule,
        LightningModule,
        Trainer,
        seed_everything,
    )
    from pytorch_lightning.callbacks import WeightAveraging
    from pytorch_lightning.loggers.logger import DummyLogger
    from pytorch_lightning.profilers import PassThroughProfiler
    from pytorch_lightning.utilities.combined_loader import CombinedLoader
    from pytorch_lightning.utilities.memory import garbage_collection_cuda, is_oom_error
    from pytorch_lightning.utilities.signature_utils import is_param_in_hook_signature

__all__ = [
    "Callback",
    "CombinedLoader",
    "DummyLogger",
    "LightningDataModule",
    "LightningModule",
    "PassThroughProfiler",
    "Trainer",
    "WeightAveraging",
    "garbage_collection_cuda",
    "is_oom_error",
    "is_param_in_hook_signature",
    "move_data_to_device",
    "seed_everything",
    "sized_len",
]
