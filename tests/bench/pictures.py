"""Pictures of what MLflow's UI shows of the present results -> reports/pictures/; run after `make repro`, needs Chromium.

python tests/bench/pictures.py: the saved view as charts, and the page of the present state's run.
"""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from browser import Browser, find  # type: ignore[import-not-found]
from test_track_servers import Server  # type: ignore[import-not-found]

from pipeline.core import artifacts
from pipeline.tracking.views import VIEW

FOLDER = artifacts.REPORTS / "pictures"
WIDTH, HEIGHT = 1440, 1250
PATIENCE = 120.0  # seconds for the UI to start, and for a page to show what it is opened for


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
    with (
        _home() as served,
        _home() as home,
        closing(Server(Path(served), Path("mlflow.db"))) as server,
        Browser(program, Path(home)) as browser,
    ):
        runs = f"{server.uri}/#/experiments/{found['experiment']}/runs"
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
