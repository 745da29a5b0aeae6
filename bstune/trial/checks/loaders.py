"""Checks that a trial can read the loaders of a user's data module."""

from torch.utils.data import DataLoader

from bstune.core.errors import ConfigError
from bstune.recipe import HOW_TO_GIVE
from bstune.system.failures import place_of
from bstune.trial.batches.counted_stream import has_no_length
from bstune.trial.batches.loader import loaders_of, not_rebatchable
from bstune.trial.lightning.installed import LightningDataModule
from bstune.trial.lightning.packages import is_overridden


def check_loaders(
    data: LightningDataModule, *, is_given: bool = False, how_to_give: str = HOW_TO_GIVE
) -> None:
    """Raise a ConfigError for a data module whose loaders a trial cannot use.

    A trial reads the training data in batches of its own size, and other loaders as they are.

    Args:
        data: the data module, set up.
        is_given: whether a function of the batch size has made it, so that its training batches may
            be taken as they come.
        how_to_give: says how the user can let such a function make it.
    """
    # Such a data module makes batches of any size itself.
    if hasattr(data, "train_batches"):
        return
    name = type(data).__name__
    for method in ("train_dataloader", "val_dataloader"):
        if not is_overridden(method, data):
            raise ConfigError(
                f"{name}{place_of(type(data))} has no {method}: define it, so that it returns a "
                "DataLoader"
            )
    problem = not_rebatchable(data.train_dataloader())
    if problem is not None and not is_given:
        raise ConfigError(
            f"{name}.train_dataloader() cannot be read in batches of another size: {problem}; "
            f"{how_to_give}. Or return DataLoader(dataset, batch_size=..., shuffle=True) over a "
            "data set with __len__ and __getitem__ (a ConcatDataset or StackDataset of several), "
            "or give the data module train_batches(batch_size, micro_batch_size, seed), which "
            "yields batches of that size without end"
        )
    loaders = data.val_dataloader()
    validation = loaders_of(loaders)
    if not validation or validation == [None]:
        raise ConfigError(
            f"{name}.val_dataloader(){place_of(type(data).val_dataloader)} returns no loader, and "
            "a trial ends by a metric that is logged in validation: return a DataLoader over the "
            "validation data"
        )
    # The examples of a stream are counted when the data are loaded.
    if has_no_length(loaders):
        return
    for loader in validation:
        if not (isinstance(loader, DataLoader) and hasattr(loader.dataset, "__len__")):
            raise ConfigError(
                f"{name}.val_dataloader() returns a {type(loader).__name__} without a length: "
                "return a DataLoader over a data set with __len__, so that evaluations take their "
                "share of the examples"
            )
