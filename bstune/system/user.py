"""The name of the user whose process this is: in a container it may be a number alone."""

import getpass
import os
import platform
from collections.abc import MutableMapping


def user_name() -> str:
    """Find the user's name in the environment or the system; else it is ``uid-123456``."""
    try:
        return getpass.getuser()
    # From Python 3.13 on it is an OSError.
    except (KeyError, OSError, ImportError):
        return f"uid-{os.getuid()}"


def process_name() -> str:
    """Write this process for people: user, machine and process, ``me@host (process 123)``."""
    return f"{user_name()}@{platform.node()} (process {os.getpid()})"


def name_user(environment: MutableMapping[str, str]) -> None:
    """Set LOGNAME for a user who has no name, as in a container with a number for a user.

    torch._dynamo and others ask for the name, and would fail.
    """
    try:
        getpass.getuser()
    except (KeyError, OSError, ImportError):
        environment["LOGNAME"] = user_name()
