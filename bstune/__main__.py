"""``python -m bstune +workload=NAME``: wires the other modules together and holds no logic."""

import sys

from bstune.command import main

if __name__ == "__main__":
    sys.exit(main())
