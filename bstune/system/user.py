"""Whose process this is, where the system has no name for it: a container's user may be a number alone."""

import getpass
import os
import platform
from collections.abc import MutableMapping


def user_name() -> str:
    """Tell the user's name, by the environment or the system; without one, ``uid-123456``."""
    try:
        return getpass.getuser()
    # OSError from Python 3.13 on.
    except (KeyError, OSError, ImportError):
        return f"uid-{os.getuid()}"


def process_name() -> str:
    """Name this process for people: user, machine and process, ``me@host (process 123)``."""
    return f"{user_name()}@{platform.node()} (process {os.getpid()})"


def name_user(environment: MutableMapping[str, str]) -> None:
    """Name a user without a name in the environment, where libraries ask for it: torch._dynamo, inductor."""
    try:
        getpass.getuser()
    except (KeyError, OSError, ImportError):
        environment["LOGNAME"] = user_name()
