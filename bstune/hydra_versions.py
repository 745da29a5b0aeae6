"""What Hydra 1.3 has to be told, and what later versions have to be told in its place.

Hydra 1.3 has to be asked for its own behaviour; 1.4 has no other, and warns of the argument. Hydra
1.4 warns of a target that a config names and nobody has allowed. A config of bstune is trusted as
code is, so that all of its targets are called.
"""

from typing import Any

import hydra.utils

# Arguments of hydra.main and of hydra.initialize_config_module.
VERSION_ARGUMENTS: dict[str, Any] = {}
if hydra.__version__.startswith("1.3."):
    VERSION_ARGUMENTS = {"version_base": "1.3"}

# Further arguments of hydra.main, and of hydra.utils.instantiate.
ALLOW_ALL_TARGETS_OF_MAIN: dict[str, Any] = {}
ALLOW_ALL_TARGETS: dict[str, Any] = {}
if hasattr(hydra.utils, "UNSAFE_DISABLE_EXECUTION_CHECKS"):
    ALLOW_ALL_TARGETS_OF_MAIN = {"execution_whitelist": hydra.utils.UNSAFE_DISABLE_EXECUTION_CHECKS}
    ALLOW_ALL_TARGETS = {"_execution_whitelist_": hydra.utils.UNSAFE_DISABLE_EXECUTION_CHECKS}
