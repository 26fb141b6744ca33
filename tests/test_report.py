"""The pages and pictures: what they say, that nothing in them lies on another, and that they hold in a real browser."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import reported
import yaml
from browser import Browser, find
from reported import around, judged, metric, result

from pipeline import report
from pipeline.core import artifacts, params
from pipeline.core.errors import ParamsError
from pipeline.gating import comment, freshness, verdicts
from pipeline.reporting import charts, plots
from pipeline.reporting.charts import Panel
from pipeline.reporting.text import Known, known
from pipeline.tracking import runs

DRAWN = ("tradeoff", "domains", "positions", "memory")


def update(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    data = artifacts.read_json(file)
    change(data)
    artifacts.write_json(file, data)


def alter() -> None:
    """Give two variants what committed results need not have: a bound, other rounds, a dequantized base, another level."""
    for name, n in (("bf16", 5), ("int8", 10)):
        for rate in ("decode_tok_s", "speed_ratio"):
            update(artifacts.metrics(name), lambda d, rate=rate, n=n: d["metrics"][rate].update(n=n))
    update(artifacts.metrics("int8"), lambda d: d.update(bounds={"decode": "decode is bound by bandwidth"}))
    for file in (artifacts.metrics("bf16"), artifacts.BASE / artifacts.MANIFEST):
        update(file, lambda d: d.update(dequantized_from="MXFP4"))
    data = yaml.safe_load(params.PARAMS.read_text(encoding="utf-8"))
    data["compare"]["confidence"] = 0.9
    params.PARAMS.write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")


@pytest.fixture(scope="module")
def houses(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Reports that were written once; tests look at them and change nothing."""
    made = {
        "written": reported.reports(tmp_path_factory.mktemp("written")),
        "altered": reported.reports(tmp_path_factory.mktemp("altered"), keep=("bf16", "int8")),
    }
    for name, house in made.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(house)
            if name == "altered":
                alter()
            report.write(params.load())
    return made


@pytest.fixture
def written(houses: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The report of the committed results."""
    monkeypatch.chdir(houses["written"])
    return houses["written"]


@pytest.fixture
def altered(houses: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The report of results that were altered."""
    monkeypatch.chdir(houses["altered"])
    return houses["altered"]


@pytest.fixture
def reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The committed results of two variants, and no report yet."""
    monkeypatch.chdir(tmp_path)
    return reported.reports(tmp_path, keep=("bf16", "int8"))


def pages(house: Path) -> tuple[str, str]:
    return tuple((house / "reports" / f"report.{kind}").read_text(encoding="utf-8") for kind in ("md", "html"))  # type: ignore[return-value]


def picture(house: Path, name: str) -> str:
    return (house / f"reports/figures/{name}.svg").read_text(encoding="utf-8")


# --- the pages ---------------------------------------------------------------------------------------------------


def test_the_readme_gets_a_line_a_variant_the_table_and_the_picture_and_no_failure_analysis(written: Path) -> None:
    readme = written / "README.md"
    readme.write_text("# top\n<!-- results -->old<!-- /results -->\nbelow\n", encoding="utf-8")
    report.write_readme()
    text, (whole, _) = readme.read_text(encoding="utf-8"), pages(written)
    lines, variants, verdict = text.split("\n"), params.load().variants, artifacts.read_json(artifacts.GATE)["verdict"]
    assert text.startswith("# top\n<!-- results -->\nMeasured by") and f"gate: **{verdict}**\n\n- **" in text
    assert text.endswith("<!-- /results -->\nbelow\n") and len(lines) < 20 + 2 * len(variants)
    assert sum(line.startswith("- **") for line in lines) == len(variants) - 1
    assert sum(line.startswith("| ") for line in lines) == len(variants) + 1
    assert "](reports/figures/tradeoff.svg)" in text and "Failure analysis" not in text and "What to serve" not in text
    assert "<summary>Failure analysis</summary>" in whole and whole.count("<details>") == whole.count("</details>") == 3


def test_both_pages_say_what_to_serve_what_is_unknown_and_how_to_reproduce(written: Path) -> None:
    digest = artifacts.read_json(artifacts.metrics("int8"))["model"]
    for page in pages(written):
        for words in ("What to serve", "bf16 (16 bits)", "ominated", "tools.bundle pack", digest, "no item changed"):
            assert words in page, words


@pytest.mark.parametrize("name", ["int8", "bf16"])
def test_what_has_no_metrics_is_a_line_with_its_reason_and_its_picture_is_not_drawn(reports: Path, name: str) -> None:
    left = reports / "reports/figures/latency.svg"
    artifacts.write_text(left, "<svg>of an earlier run</svg>")
    for other in params.load().variants:  # whatever the committed results have by now
        swept = [k for k in artifacts.read_json(artifacts.metrics(other))["metrics"] if re.search(r"/(context|batch|closed)-", k)]
        update(artifacts.metrics(other), lambda d, swept=swept: [d["metrics"].pop(k) for k in swept])
    why = {"reason": "no <kernel> for it here"}
    update(artifacts.metrics(name), lambda d: d.update(why, status="unsupported", metrics={}, curves={}, machine=None))
    update(artifacts.GATE, lambda d: d["variants"]["int8"].update(why, verdict="UNSUPPORTED", rules=[]))
    report.write(params.load())
    wording, html = pages(reports)
    assert f"{name}: unsupported: no <kernel> for it here" in wording and "<kernel>" not in html
    assert "No variant passes every required rule" in wording and f"{name}: unsupported: no &lt;kernel&gt;" in html
    assert not left.exists() and all("no variant was served at several loads" in page for page in (wording, html))


@pytest.mark.parametrize("changed", [[], [f"file-{k}" for k in range(9)]], ids=["current", "stale"])
def test_the_printed_summary_says_on_top_what_is_stale_and_below_the_advice(
    written: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, changed: list[str]
) -> None:
    monkeypatch.setattr(freshness, "status", lambda: (changed, []))
    report.print_summary(params.load())
    lines = capsys.readouterr().out.split("\n")
    files = "file-0, file-1, file-2, file-3, file-4, file-5, file-6, file-7 and 1 more"
    assert lines[0].startswith("STALE: ") is bool(changed)
    assert not changed or lines[0].endswith(f"changed: {files}; run `dvc repro`")
    assert [line.split(": ")[0] for line in lines if line.startswith(("advice", "  next"))] == ["advice", "  next"]


def test_the_first_look_is_the_verdict_on_what_is_there_and_is_silent_once_all_is(
    reports: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = params.load()
    first, verdict = settings.gate.required[0], artifacts.read_json(artifacts.GATE)
    others = set(settings.variants) - {settings.reference, first}
    for name in others:
        artifacts.metrics(name).unlink()
    report.print_first(settings)
    printed = capsys.readouterr().out
    assert (
        f"{first}: {verdict['variants'][first]['verdict']} so far: " in printed and f"{len(others)} more variants follow" in printed
    )
    assert not any(name in printed for name in others)
    monkeypatch.setattr(freshness, "status", lambda: ([], []))
    report.print_first(settings)
    assert capsys.readouterr().out == ""


def test_two_things_at_once_are_refused_and_nothing_is_written(written: Path) -> None:
    with pytest.raises(ParamsError, match=r"--summary and --readme.* exclude each other"):
        report.main(summary=True, readme=True)


def test_no_name_stands_twice_in_the_page_and_nothing_of_it_is_fetched(written: Path) -> None:
    _, html = pages(written)
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert ids and len(ids) == len(set(ids))
    assert not re.search(r'\bsrc=|<link|@import|url\((?!#)|href="(?!#)', html)


def test_a_report_written_twice_is_the_same_to_the_byte(altered: Path) -> None:
    def files() -> dict[str, bytes]:
        return {str(f): f.read_bytes() for f in (altered / "reports").rglob("*") if f.is_file()}

    before = files()
    report.write(params.load())
    assert before == files() and any(name.endswith("positions.svg") for name in before)


def test_bounds_rounds_and_what_the_base_was_dequantized_from_are_said_alike_everywhere(altered: Path) -> None:
    settings = params.load()
    results, verdict = report.load_results(settings)
    note = runs.state_note(results, verdict, settings)
    texts = (*pages(altered), note, picture(altered, "tradeoff"))
    assert all("decode is bound by bandwidth" in page and "None" not in page for page in pages(altered))
    assert all("5 to 10 rounds" in text for text in texts)
    assert not re.search(r"(?<!to )(?<!within )\b(5|10) rounds", "".join(texts))
    source = "(dequantized from MXFP4)"
    assert all("; dequantized from MXFP4; a note" in page and f"reference {source}" in page for page in pages(altered))
    assert f"Reference: `bf16` {source}" in comment.render(verdicts.Merge(verdict, results))
    assert f"against `bf16` {source}" in note


# --- pictures ----------------------------------------------------------------------------------------------------


def test_every_picture_says_itself_in_words_has_a_unit_and_n_and_each_colour_has_one_for_the_dark(written: Path) -> None:
    themed = {light for light, _ in plots.THEME.values()}
    for name in DRAWN:
        svg = picture(written, name)
        assert re.search(r'<svg [^>]*role="img" aria-label="[^"]{20,}"', svg), name
        assert "n = " in svg and ("nats" in svg or "MB" in svg), name
        used = set(re.findall(r"#[0-9a-f]{6}", " ".join(re.findall(r' style="[^"]*"', svg))))
        assert used and used <= themed, (name, used - themed)


def test_every_picture_with_bars_and_its_caption_say_of_which_level_they_are(altered: Path) -> None:
    for name in ("tradeoff", "domains", "positions", "latency"):
        svg = picture(altered, name)
        assert "Bars: 90 % intervals" in svg and not re.search("95 %", svg), name
    _, page = pages(altered)
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", page)
    assert sum("Bars: 90 % intervals" in c for c in captions) == len(captions) - 1 == 4, "but memory's, which has no bars"
    assert all("90 % intervals" in c for c in re.findall(r"<caption>(.*?)</caption>", page, re.DOTALL))
    assert "one document, so no interval" in picture(altered, "domains")


def test_every_mark_of_the_trade_off_has_a_number_that_the_legend_explains(tmp_path: Path) -> None:
    results = {"bf16": result("bf16", 1.0, 0.0, 269)} | {f"int4-number-{k}": result("int4", 2.0, 0.3, 90) for k in range(9)}
    results["no-speed"] = result("int8", 2.0, 0.1, 143) | {"metrics": {}}
    verdict = {"variants": {name: judged("FAIL") for name in results if name != "bf16"}}
    alt = plots.draw_tradeoff(results, verdict, "bf16", 0.95, tmp_path / "t.svg")
    svg = (tmp_path / "t.svg").read_text(encoding="utf-8")
    drawn = [name for name in results if name != "no-speed"]
    assert "no-speed" not in alt and "int4-number-8" in alt
    for k, name in enumerate(drawn, 1):
        assert f">{k}</text>" in svg and re.search(rf">{k}: {name} · [^<]* · (FAIL|REFERENCE)[^<]*</text>", svg), name


def test_without_values_there_is_no_picture_and_an_empty_trade_off(tmp_path: Path) -> None:
    results = {name: result(name, 1.0, 0.0, 269) | {"metrics": {}} for name in ("bf16", "int8")}
    for draw in (charts.draw_domains, charts.draw_positions):
        assert draw(results, "bf16", 0.95, tmp_path / "p.svg") is None
    assert charts.draw_memory(results, tmp_path / "p.svg") is None
    assert charts.draw_latency([], 0.95, tmp_path / "p.svg") is None and not list(tmp_path.iterdir())
    assert "no variant" in plots.draw_tradeoff(results, {"variants": {}}, "bf16", 0.95, tmp_path / "t.svg")


def test_latency_is_drawn_from_parts_of_metrics_and_from_what_was_served(tmp_path: Path) -> None:
    results = {n: result(n, 1.0, 0.1, 100) for n in ("bf16", "int8")}
    for r in results.values():
        r["metrics"] |= {f"ttft_ms/context-{c}": around(c / 2.0, n=3) for c in (256, 1024)}
        r["metrics"]["tpot_ms/batch-4"] = around(9.0)  # one point is no curve
    results["int8"]["metrics"]["ttft_ms/context-4096"] = metric(None)
    levels = {f"closed-{c}": {"ttft_p50_ms": around(80.0 * c), "throughput_tok_s": around(50.0 * c)} for c in (1, 4)}
    panels = charts.sweeps(results, {"int8": {"levels": levels | {"open-2": {"ttft_p50_ms": around(1.0)}}}}, 999)
    assert [(panel.title, panel.axis, sorted(panel.curves)) for panel in panels] == [
        ("TTFT", "tokens of context", ["bf16", "int8"]),
        ("TTFT p50, server", "requests at once", ["int8"]),
        ("throughput, server", "requests at once", ["int8"]),
    ]
    assert [x for x, _ in panels[0].curves["int8"]] == [256, 1024]
    alt = charts.draw_latency(panels, 0.95, tmp_path / "latency.svg")
    svg = (tmp_path / "latency.svg").read_text(encoding="utf-8")
    assert alt and "TTFT by tokens of context" in alt and svg.count(">int8<") == svg.count(">bf16<") == 1
    assert "TTFT (ms; n = 3)" in svg


def test_variants_stand_side_by_side_at_a_load_so_that_no_interval_lies_on_another() -> None:
    curves = {f"v{k}": [(x, Known(x / 2, None, 1)) for x in (1.0, 2.0, 8.0)] for k in range(8)}
    shifted = charts.side_by_side(curves)
    for k, x in enumerate((1.0, 2.0, 8.0)):
        at = [curve[k][0] for curve in shifted.values()]
        assert all(b / a > 1.02 for a, b in pairwise(at)) and x / 1.3 < at[0] < x < at[-1] < x * 1.3
    assert charts.side_by_side({"one": curves["v0"]})["one"] == curves["v0"]


def test_an_interval_that_leaves_its_panel_ends_in_an_arrow_at_the_edge(tmp_path: Path) -> None:
    wide, narrow = Known(100.0, (0.0, 1e4), 2), Known(110.0, (108.0, 112.0), 5)
    assert charts.within(wide, 40.0, 400.0) == (Known(100.0, (40.0, 400.0), 2), [(40.0, -1), (400.0, 1)])
    assert charts.within(narrow, 40.0, 400.0) == (narrow, []) and charts.within(Known(1.0, None, 1), 2.0, 3.0)[1] == []
    panel = Panel("TTFT", "ms", "sequences at once", {"int8": [(1.0, wide), (4.0, narrow)]})
    charts.draw_latency([panel], 0.95, tmp_path / "l.svg")
    assert "an arrow: the interval goes on" in (tmp_path / "l.svg").read_text(encoding="utf-8")


def test_where_the_rounds_have_a_sweep_s_context_the_picture_takes_theirs_as_the_table_does() -> None:
    r = result("bf16", 1.0, 0.0, 269)
    r["metrics"] |= {"ttft_ms": around(100.0, n=10), "ttft_ms/context-256": around(90.0), "ttft_ms/context-1024": around(400.0)}
    curve = charts.sweeps({"bf16": r}, {}, 256)[0].curves["bf16"]
    assert curve == [(256, known(around(100.0, n=10))), (1024, known(around(400.0)))]
    assert charts.sweeps({"bf16": r}, {}, 512)[0].curves["bf16"][0][1].value == 90.0


# --- in a real browser -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = find()
    if program is None:
        pytest.skip("no Chromium on this machine: the page was not opened in a browser")
    with Browser(program, tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_opens_in_a_browser_without_error_or_request_and_nothing_is_cut_off(
    browser: Browser, written: Path, dark: bool, width: int
) -> None:
    browser.open(written / "reports/report.html", width=width, dark=dark)
    browser.run("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert not any(map(browser.heard, ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled")))
    asked = {e["request"]["url"] for e in browser.heard("Network.requestWillBeSent")}
    assert asked == {(written / "reports/report.html").resolve().as_uri()}
    assert browser.run("document.documentElement.scrollWidth") <= width
    rows = browser.run("[...document.querySelectorAll('table')[0].tBodies[0].rows].map(r => r.cells[0].innerText)")
    assert rows == list(params.load().variants)
    captions = browser.run(
        "[...document.querySelectorAll('caption')].map(c => { const r = document.createRange(); r.selectNodeContents(c);"
        "const b = r.getBoundingClientRect(), s = c.closest('.scroll').getBoundingClientRect();"
        "return [b.left - s.left, s.right - b.right, b.height, c.innerText.slice(0, 40)] })"
    )
    assert len(captions) >= 5 and all(left > -1 and right > -1 and height > 10 for left, right, height, _ in captions), captions
    drawn = len(list((written / "reports/figures").glob("*.svg")))
    assert browser.run("document.querySelectorAll('figure svg').length") == drawn >= len(DRAWN)
    ground = browser.run("getComputedStyle(document.body).backgroundColor")
    paper = browser.run("getComputedStyle(document.querySelector('figure svg path')).fill")
    assert ground == paper == ("rgb(13, 17, 23)" if dark else "rgb(255, 255, 255)")


def test_text_is_readable_in_both_themes(browser: Browser, written: Path) -> None:
    """Contrast of at least 4.5 to 1, as WCAG 2 asks of text."""
    luminance = (
        "c => { const v = c.match(/[0-9.]+/g).slice(0, 3).map(x => { x /= 255; return x <= 0.03928 ? x / 12.92 : "
        "((x + 0.055) / 1.055) ** 2.4 }); return 0.2126 * v[0] + 0.7152 * v[1] + 0.0722 * v[2] }"
    )
    script = (
        f"(() => {{ const l = {luminance}; const page = l(getComputedStyle(document.body).backgroundColor); let worst = 99;"
        "for (const e of document.querySelectorAll('p, li, td, th, caption, figcaption, summary, h1, h2, svg text, code')) {"
        "const s = getComputedStyle(e), a = l(e.closest('svg') ? s.fill : s.color);"
        "worst = Math.min(worst, (Math.max(a, page) + 0.05) / (Math.min(a, page) + 0.05)) } return worst })()"
    )
    for dark in (False, True):
        browser.open(written / "reports/report.html", width=1280, dark=dark)
        assert browser.run(script) >= 4.5, "dark" if dark else "light"


def test_the_page_is_printed_light_unfolded_and_fits_a_sheet_of_a4(browser: Browser, written: Path) -> None:
    width = 680  # CSS pixels of 210 mm less margins of 15 mm
    browser.open(written / "reports/report.html", width=width, dark=True)
    folded = "[...document.querySelectorAll('main > details > :not(summary)')].map(e => e.checkVisibility())"
    assert not any(browser.run(folded))
    browser.call("Emulation.setEmulatedMedia", media="print", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    assert browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.run("getComputedStyle(document.querySelector('figure svg path')).fill") == "rgb(255, 255, 255)"
    assert all(browser.run(folded))
    browser.run("document.querySelectorAll('details').forEach(d => d.open = true)")
    over = browser.run(
        f"[...document.querySelectorAll('table, svg, pre')].filter(e => e.getBoundingClientRect().right > {width + 1})"
        ".map(e => e.parentElement.getAttribute('aria-label') || e.tagName)"
    )
    assert over == [] and browser.run("document.documentElement.scrollWidth") <= width
    sizes = browser.run("[...document.querySelectorAll('td')].map(e => parseFloat(getComputedStyle(e).fontSize))")
    assert min(sizes) >= 9.3, "small, but still to be read: 7 points"
    browser.call("Emulation.setEmulatedMedia", media="")


def test_the_page_can_be_walked_by_keyboard_and_heard(browser: Browser, written: Path) -> None:
    browser.open(written / "reports/report.html", width=1280)
    levels = browser.run("[...document.querySelectorAll('h1, h2, h3, h4')].map(h => +h.tagName[1])")
    assert levels[0] == 1 and levels.count(1) == 1 and all(b - a <= 1 for a, b in pairwise(levels))
    assert browser.run("[...document.querySelectorAll('th')].every(h => ['col', 'row'].includes(h.scope))")
    assert browser.run("document.documentElement.lang") == "en"
    labels = browser.run("[...document.querySelectorAll('[role=region]')].map(r => r.getAttribute('aria-label'))")
    assert len(labels) == len(set(labels)) and all(labels)
    assert browser.run("[...document.querySelectorAll('svg')].every(s => s.getAttribute('aria-label').length > 20)")
    reached = set()
    for _ in range(300):
        browser.press("Tab")
        reached.add(at := browser.run("document.activeElement.tagName + ': ' + document.activeElement.innerText.slice(0, 40)"))
        if at.startswith("BODY"):  # once round
            break
    summaries = browser.run("[...document.querySelectorAll('main > details > summary')].map(s => s.innerText.slice(0, 40))")
    assert summaries and all(f"SUMMARY: {text}" in reached for text in summaries)
    browser.run("document.querySelector('summary').focus()")
    browser.press("Enter")
    assert browser.run("document.querySelector('details').open")
