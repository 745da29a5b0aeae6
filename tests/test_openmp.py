"""How long torch's threads wait awake, in the processes that train."""

import os

import pytest

from bstune.system.openmp import SPIN, WAIT_POLICY, spin_shortly
from bstune.trial.processes import fork_server


@pytest.mark.parametrize(
    ("environment", "spin"),
    [({}, "1000"), ({SPIN: "7"}, "7"), ({WAIT_POLICY: "active"}, None)],
)
def test_threads_spin_shortly_unless_the_user_says_how(environment, spin, monkeypatch):
    changed = dict(environment)
    # First in a mapping of its own, then as the fork server gets it.
    spin_shortly(changed)
    assert changed.get(SPIN) == spin
    for name in (SPIN, WAIT_POLICY):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    seen = []
    monkeypatch.setattr(
        fork_server.forkserver, "ensure_running", lambda: seen.append(os.environ.get(SPIN))
    )
    before = dict(os.environ)
    fork_server.start_server()
    assert seen == [spin], "the fork server imports torch"
    assert dict(os.environ) == before
