"""What bstune needs, and with which of Lightning's two packages: pyproject.toml has all else.

    BSTUNE_LIGHTNING=pytorch-lightning pip install PATH_OF_BSTUNE

needs pytorch-lightning alone, for projects that have that; without the variable it is lightning,
which brings both. A pyproject.toml reads no environment, and names either all dependencies or none.
"""

import os

from setuptools import setup

LIGHTNING = ("lightning", "pytorch-lightning")
DEPENDENCIES = (
    "torch>=2.6",
    "optuna>=4.9,<6",
    "hydra-core>=1.3.2,<1.5",
    "omegaconf>=2.3,<2.5",
    "pyyaml>=6",
    "sqlalchemy>=2",
    "alembic>=1.13",
    "mlflow>=3.9,<4",
    "numpy>=1.26",
    "scipy>=1.16",
    "matplotlib>=3.8",
    "plotly>=6",  # of which pages hold the JavaScript
    "cloudpickle>=2.2",
    "pandas>=2",
    "rich>=13",
    "scikit-learn>=1.4",
    "pooch>=1.8",
    "filelock>=3.13",
    "pydantic>=2.11",
    "greenlet>=3",  # for optuna's GP sampler, which warns without it
)

chosen = os.environ.get("BSTUNE_LIGHTNING") or LIGHTNING[0]
if chosen not in LIGHTNING:
    raise SystemExit(f"BSTUNE_LIGHTNING must be {' or '.join(LIGHTNING)}, but got {chosen}")
setup(install_requires=[f"{chosen}>=2.6,<3", *DEPENDENCIES])
