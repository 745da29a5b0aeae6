"""The commit that results come from, as git says it."""

import subprocess

GIT_SECONDS = 5.0


def git_commit() -> str | None:
    """Ask git for the commit of the working directory; None without a repository or git."""
    # It is the git on the user's own path.
    command = ["git", "rev-parse", "HEAD"]
    try:
        commit = subprocess.check_output(  # noqa: S603
            command, stderr=subprocess.DEVNULL, text=True, timeout=GIT_SECONDS
        )
        return commit.strip()
    except (OSError, subprocess.SubprocessError):
        return None
