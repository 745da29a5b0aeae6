"""Debian's Chromium without a window, driven by selenium, and a server of MLflow for it to look at."""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest

CHROMIUM = shutil.which("chromium")
DRIVER = shutil.which("chromedriver")
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-sync",
)
OPTIONS += ("--disable-background-networking", "--disable-component-update", "--hide-scrollbars")
# A page, or the server, may take so long to be there on a busy machine.
SECONDS = 120


def skip_without_chromium() -> Any:
    """Selenium; skip the test where it, or Debian's chromium or chromium-driver, is not installed."""
    missing = [
        name for name, path in (("chromium", CHROMIUM), ("chromium-driver", DRIVER)) if path is None
    ]
    if missing:
        pytest.skip(f"needs Debian's {' and '.join(missing)}")
    return pytest.importorskip("selenium.webdriver", reason="needs pip install 'bstune[browser]'")


@contextmanager
def opened_browser(profile: Path, width: int, height: int) -> Iterator[Any]:
    """Open a browser whose pages are so many pixels wide and high, with an empty profile in a new folder."""
    webdriver = skip_without_chromium()
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for option in (*OPTIONS, f"--user-data-dir={profile}", f"--window-size={width},{height}"):
        options.add_argument(option)
    # So that errors() has what to read.
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        resize(driver, width, height)
        yield driver
    finally:
        driver.quit()


def resize(driver: Any, width: int, height: int) -> None:
    """Make pages so many pixels wide, of which Chromium's windows have at least 500, and high."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def errors(driver: Any) -> list[str]:
    """The errors in the pages' consoles since this was last asked."""
    return [entry["message"] for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]


def awaited(driver: Any, script: str, enough: Callable[[Any], Any] = bool) -> Any:
    """The value of a script on the page, once that is enough."""
    from selenium.webdriver.support.ui import WebDriverWait

    def look(driver: Any) -> Any:
        found = driver.execute_script(script)
        return [found] if enough(found) else None

    return WebDriverWait(driver, SECONDS).until(look)[0]


@contextmanager
def mlflow_server(folder: Path) -> Iterator[str]:
    """Serve ``mlflow.db`` in a folder on loopback; the server's address."""
    # The system chooses a port that nobody has.
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "mlflow",
        "server",
        "--workers",
        "1",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    command += ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db"]
    environment = {
        **os.environ,
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True
        )
    try:
        address = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + SECONDS
        while not _answers(address):
            # It has ended, and the log says why.
            assert server.poll() is None, (folder / "server.log").read_text()
            assert time.monotonic() < deadline, (folder / "server.log").read_text()
            time.sleep(0.2)
        yield address
    finally:
        # The server's workers end with it.
        os.killpg(server.pid, 15)
        server.wait()


def _answers(address: str) -> bool:
    try:
        with urlopen(f"{address}/health", timeout=5) as answer:  # noqa: S310 (an address of its own)
            return bool(answer.status == 200)
    except (URLError, OSError):
        return False
