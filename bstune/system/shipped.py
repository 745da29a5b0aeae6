"""What ships in ``conf/``, found without Hydra: a help text need not wait for that."""

from importlib.resources import files

CONFIG_MODULE = "bstune.conf"


def read_shipped(name: str) -> str:
    """Read the text of a file of ``conf/``, by its path there."""
    return files(CONFIG_MODULE).joinpath(name).read_text(encoding="utf-8")


def choices_in(group: str) -> list[str]:
    """List the choices of a config group that ship, such as the samplers, by name and sorted."""
    choices = list[str]()
    for file in files(CONFIG_MODULE).joinpath(group).iterdir():
        if file.name.endswith(".yaml"):
            choices.append(file.name.removesuffix(".yaml"))
    return sorted(choices)


def workload_names() -> list[str]:
    """List the names of the workloads that ship, sorted."""
    return choices_in("workload")
