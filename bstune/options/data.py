"""``data``: where data sets lie."""

from bstune.options.values import HomePath, Section


class DataOptions(Section):
    """Where data sets lie."""

    root: HomePath
    """Folder of the data sets."""
