"""Hydra's sweeper of bstune, which Hydra finds below ``hydra_plugins``; all of it is in ``bstune.integrations``."""
