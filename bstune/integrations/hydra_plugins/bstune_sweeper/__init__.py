"""Hydra's sweeper of bstune, which Hydra finds below ``hydra_plugins``.

All of it is in ``bstune.integrations``.
"""
