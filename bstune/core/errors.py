"""The few named exceptions; the command line turns each into a plain message and an exit status."""


class BstuneError(Exception):
    """An error the user can fix: the message states what was received and what to do."""

    exit_status = 2

    def __str__(self) -> str:
        """Give the message; of an error in a DataLoader's process, without its traceback."""
        text = super().__str__()
        if "\nOriginal Traceback" not in text:
            return text
        name = f"{type(self).__module__}.{type(self).__name__}: "
        return text.rpartition(name)[2].strip()


class ConfigError(BstuneError):
    """An option, workload, sampler or rule is unknown, or its value cannot be used."""


class InputError(BstuneError):
    """A file that a user names, or others wrote, cannot be read as what it should be."""


class DataError(BstuneError):
    """A data set is missing, cannot be downloaded, or its bytes are not the published ones."""


class RecordError(BstuneError, ValueError):
    """A text that should be a trial's record is none."""


class TableError(BstuneError):
    """A table of recorded runs cannot be read or used."""


class StudyError(BstuneError):
    """A study cannot be opened or continued: its storage, lock, output folder or settings."""


class UserCodeError(BstuneError):
    """The user's own module or data raised an error: the message has the frames of their files."""

    exit_status = 1


class HardwareError(BstuneError):
    """Memory, step time or ceilings cannot be measured or derived."""


class StateError(BstuneError):
    """The state that a stopped trial left cannot be used: it starts afresh."""


class Interrupted(BstuneError):
    """Ctrl-C or a termination signal ended a study that the same command continues."""

    exit_status = 130


def check_positive_integer(name: str, value: object) -> None:
    """Raise a ConfigError that names the value as ``name`` unless it is a positive integer."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} must be a positive integer, but got {value!r}")
