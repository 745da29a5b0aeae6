"""How long a thread of torch's OpenMP waits awake for the others, on a CPU.

GNU's spins for some milliseconds by default, as long as tens of small training steps take. Where
the cores have other work to do, the thread that is waited for does not get one meanwhile: with two
threads on two busy cores (load 10), 20 steps of ``digits`` took 2.7 to 4.8 s, and 0.1 to 0.4 s
where they spin for microseconds. With the cores nearly to itself (nice -19) a step took as long
either way: 1.7 ms at B = 64, 2.4 to 2.8 ms at B = 512. Results do not depend on it.
"""

from collections.abc import MutableMapping

SPIN = "GOMP_SPINCOUNT"
WAIT_POLICY = "OMP_WAIT_POLICY"
# So many turns of the loop in which a thread waits awake take microseconds.
FEW_TURNS = "1000"


def spin_shortly(environment: MutableMapping[str, str]) -> None:
    """Let threads of OpenMP fall asleep after microseconds of waiting, by an environment variable.

    OpenMP reads it when torch is imported. Where the environment says already how threads wait, it
    stays as it is.
    """
    if not {SPIN, WAIT_POLICY} & environment.keys():
        environment[SPIN] = FEW_TURNS
