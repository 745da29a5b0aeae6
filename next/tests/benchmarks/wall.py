"""Gate *wall*: ``wall_seconds`` from prompt to prompt. Run nothing else.

    PROJECT_DATA=... python tests/benchmarks/wall.py [--seeds 1]

A row is one study of ``bstune.tune`` in a process of its own, imports included: its seconds beside
the limit, its verdict, and where the seconds went.

Short form: ``--walls 60 --projects tutorial --loads quiet --rows /tmp/wall.jsonl``.
"""

import sys

from common import add_rows, jobs_of, parser, read_rows
from projects import PROJECTS, busy
from race import LOADS, compete

PROJECTS_RUN = ("tutorial", "own_collate", "fashion_cnn", "char_lstm")
WALLS = (60.0, 120.0, 300.0)
# A study ends within this share of its limit, or so many seconds of it.
SHARE = 0.05
SECONDS = 10.0


def measure(project, wall_seconds, load, seed):
    """One study."""
    with busy(LOADS[load]):
        return compete("bstune", project, wall_seconds, seed, sys.executable)


def main():
    options = parser(__doc__, "wall.jsonl", seeds=1)
    options.add_argument("--projects", nargs="*", choices=PROJECTS, default=PROJECTS_RUN)
    options.add_argument("--walls", nargs="*", type=float, default=WALLS)
    options.add_argument("--loads", nargs="*", choices=LOADS, default=list(LOADS))
    given = options.parse_args()
    jobs = jobs_of(
        seed=range(given.seeds), project=given.projects, wall_seconds=given.walls, load=given.loads
    )
    add_rows(given, jobs, measure)
    rows = read_rows(given.rows)
    in_time = 0
    for row in rows:
        limit = row["wall_seconds"]
        is_answered = "verdict" in row
        in_time += is_answered and row["seconds"] <= limit + max(SHARE * limit, SECONDS)
        spent = row.get("spent", {})
        parts = ", ".join(f"{name} {value / row['seconds']:.0%}" for name, value in spent.items())
        what = row["verdict"] if is_answered else row["error"]
        cell = f"{row['project']} {row['load']} {row['seed']}"
        print(f"{cell}: {row['seconds']:.1f} of {limit:.0f} s; {what}; {parts}")
    print(f"{in_time} of {len(rows)} answer within {SHARE:.0%} or {SECONDS:.0f} s of their limit")


if __name__ == "__main__":
    main()
