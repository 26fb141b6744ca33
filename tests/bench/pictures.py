"""Pictures of what MLflow's UI shows of the present results -> reports/pictures/; run after `make repro`, needs Chromium.

python tests/bench/pictures.py: the saved view as charts, and the page of the present state's run.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import httpx2
from browser import Browser, find  # type: ignore[import-not-found]

from pipeline.core import artifacts
from pipeline.tracking.views import VIEW

FOLDER = artifacts.REPORTS / "pictures"
WIDTH, HEIGHT = 1440, 1250
PATIENCE = 120.0  # seconds for the UI to start, and for a page to show what it is opened for


@contextlib.contextmanager
def served(database: Path) -> Iterator[str]:
    """The address of an MLflow UI on a database, on a free port of this machine only; it is gone afterwards, come what may."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["-m", "mlflow", "ui", "--backend-store-uri", f"sqlite:///{database}", "--host", "127.0.0.1", "--port", str(port)]
    with tempfile.TemporaryFile() as said:
        ui = subprocess.Popen([sys.executable, *words], stdout=said, stderr=said, start_new_session=True)
        try:
            until = time.monotonic() + PATIENCE
            while not _up(f"http://127.0.0.1:{port}/health"):
                if ui.poll() is not None or time.monotonic() > until:
                    said.seek(0)
                    raise SystemExit(f"mlflow ui did not start: {said.read().decode(errors='replace')[-500:]}")
                time.sleep(0.5)
            yield f"http://127.0.0.1:{port}"
        finally:
            stop(ui)


def stop(ui: subprocess.Popen[bytes]) -> None:
    """End a process and those that it started: it leads a group of its own."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(ui.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            ui.wait(10)


def _up(address: str) -> bool:
    try:
        return httpx2.get(address, timeout=2, trust_env=False).status_code == 200
    except httpx2.HTTPError:
        return False


def show(browser: Browser, address: str, *words: str) -> None:
    """Open a page in a light window and wait until it shows all words."""
    browser.call("Emulation.setDeviceMetricsOverride", width=WIDTH, height=HEIGHT, deviceScaleFactor=1, mobile=False)
    browser.call("Page.navigate", url=address)
    wait(browser, *words)


def wait(browser: Browser, *words: str) -> None:
    until = time.monotonic() + PATIENCE
    while missing := [w for w in words if not browser.run(f"(document.body?.innerText || '').includes({json.dumps(w)})")]:
        if time.monotonic() > until:
            raise SystemExit(f"MLflow's page at {browser.run('location.href')} does not show {missing}")
        browser.run("new Promise(r => setTimeout(r, 500))")
    browser.run("new Promise(r => setTimeout(r, 3000))")  # what is drawn after the text


def close_assistant(browser: Browser) -> None:
    """MLflow opens a chat beside a first visit, which hides a quarter of what a person sees later."""
    browser.run("document.querySelector('[data-component-id=\"mlflow.assistant.chat_panel.close\"]')?.click()")
    browser.run("new Promise(r => setTimeout(r, 2000))")


def _home() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(ignore_cleanup_errors=True)  # the browser's last child may still write there


def take(browser: Browser, name: str) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    with artifacts.atomic_file(FOLDER / f"{name}.png") as tmp:
        browser.picture(tmp, whole=False)
    print(f"{FOLDER / name}.png")


def main() -> None:
    """Take both pictures of the state that reports/mlflow.json names."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended; the UI is stopped"))  # an exception, so that `served` ends
    program = find()
    if program is None:
        raise SystemExit("no Chromium on this machine; install one (Debian: apt-get install chromium)")
    if not (Path("mlflow.db").exists() and artifacts.MLFLOW.exists()):
        raise SystemExit("mlflow.db or reports/mlflow.json is missing; run `dvc repro` in this folder first")
    found = artifacts.read_json(artifacts.MLFLOW)
    with served(Path("mlflow.db")) as address, _home() as home, Browser(program, Path(home)) as browser:
        runs = f"{address}/#/experiments/{found['experiment']}/runs"
        show(browser, f"{runs}?viewStateShareKey={VIEW}&compareRunsMode=CHART", *found["runs"], "Trade-off")
        close_assistant(browser)
        browser.run(
            "document.head.append(Object.assign(document.createElement('style'), {textContent: '.modebar {display: none}'}))"
        )
        take(browser, "mlflow-tradeoff")
        show(browser, f"{runs}/{found['parent']}", "child runs are the variants", *found["runs"])
        browser.run("[...document.querySelectorAll('button')].find(e => e.innerText === 'Show more')?.click()")
        wait(browser, "Show less", "Artifacts: report/report.html")
        take(browser, "mlflow-state")


if __name__ == "__main__":
    main()
