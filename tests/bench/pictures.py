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

import harness  # noqa: F401  # the tests' helpers are found by it
from browser import Browser, find  # type: ignore[import-not-found]
from test_track_servers import Server  # type: ignore[import-not-found]

from pipeline.core import artifacts
from pipeline.tracking.runs import VIEW

FOLDER = artifacts.REPORTS / "pictures"
WIDTH, HEIGHT = 1440, 1250
PATIENCE = 120.0  # seconds for a page to show what it is opened for
CLOSE_CHAT = "document.querySelector('[data-component-id=\"mlflow.assistant.chat_panel.close\"]')?.click()"  # a first visit's
NO_TOOLBARS = "document.head.append(Object.assign(document.createElement('style'), {textContent: '.modebar {display: none}'}))"
SHOW_MORE = "[...document.querySelectorAll('button')].find(e => e.innerText === 'Show more')?.click()"


def pause(browser: Browser, seconds: float) -> None:
    """In the page, so that what the browser tells meanwhile is read."""
    browser.run(f"new Promise(r => setTimeout(r, {1000 * seconds}))")


def wait(browser: Browser, *words: str) -> None:
    """Until the page shows all words."""
    until = time.monotonic() + PATIENCE
    while missing := [w for w in words if not browser.run(f"(document.body?.innerText || '').includes({json.dumps(w)})")]:
        if time.monotonic() > until:
            raise SystemExit(f"MLflow's page at {browser.run('location.href')} does not show {missing}")
        pause(browser, 0.5)
    pause(browser, 3)  # what is drawn after the text


def take(browser: Browser, name: str) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    with artifacts.atomic_file(FOLDER / f"{name}.png") as tmp:
        browser.picture(tmp, whole=False)
    print(f"{FOLDER / name}.png")


def main() -> None:
    """Take both pictures of the state that reports/mlflow.json names."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended; the UI is stopped"))  # an exception, so that the server ends
    program = find()
    if program is None:
        raise SystemExit("no Chromium on this machine; install one (Debian: apt-get install chromium)")
    state = artifacts.read_json(artifacts.MLFLOW)
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home,  # the browser's last child may still write there
        closing(Server(Path(home), Path("mlflow.db"))) as server,
        Browser(program, Path(home, "browser")) as browser,
    ):
        runs = f"{server.uri}/#/experiments/{state['experiment']}/runs"
        browser.call("Emulation.setDeviceMetricsOverride", width=WIDTH, height=HEIGHT, deviceScaleFactor=1, mobile=False)
        browser.call("Page.navigate", url=f"{runs}?viewStateShareKey={VIEW}&compareRunsMode=CHART")
        wait(browser, *state["runs"], "Trade-off")
        browser.run(CLOSE_CHAT)
        browser.run(NO_TOOLBARS)
        pause(browser, 2)
        take(browser, "mlflow-tradeoff")
        browser.call("Page.navigate", url=f"{runs}/{state['parent']}")
        wait(browser, "child runs are the variants", *state["runs"])
        browser.run(SHOW_MORE)
        wait(browser, "Show less", "Artifacts: report/report.html")
        take(browser, "mlflow-state")


if __name__ == "__main__":
    main()
