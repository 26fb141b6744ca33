"""The pages and pictures: their text, that nothing overlaps, and how they behave in a real browser."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
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
from pipeline.reporting import charts, recommendation
from pipeline.reporting.charts import Panel
from pipeline.reporting.text import Known, show
from pipeline.tracking import runs

DRAWN = ("tradeoff", "domains", "positions", "memory")


def update(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    data = artifacts.read_json(file)
    change(data)
    artifacts.write_json(file, data)


def alter() -> None:
    """Change what committed results need not have: a bound, other rounds, a dequantized base, another level of confidence."""
    for name, n in (("bf16", 5), ("int8", 10)):
        for rate in ("decode_tok_s", "speed_ratio"):
            update(artifacts.metrics(name), lambda d, rate=rate, n=n: d["metrics"][rate].update(n=n, confidence=0.9))
    update(artifacts.metrics("int8"), lambda d: d.update(bounds={"decode": "decode is bound by bandwidth: it reads 1 MB"}))
    for file in (artifacts.metrics("bf16"), artifacts.BASE / artifacts.MANIFEST):
        update(file, lambda d: d.update(dequantized_from="MXFP4"))
    data = yaml.safe_load(params.PARAMS.read_text(encoding="utf-8"))
    data["compare"]["confidence"] = 0.9
    params.PARAMS.write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")


@pytest.fixture(scope="module")
def houses(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Reports written once; tests only read them."""
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
    """The report of altered results."""
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


def test_the_readme_gets_verdict_advice_six_columns_one_line_on_n_and_floor_and_the_picture(written: Path) -> None:
    readme = written / "README.md"
    readme.write_text("# top\n<!-- results -->old<!-- /results -->\nbelow\n", encoding="utf-8")
    report.write_readme()
    text, variants = readme.read_text(encoding="utf-8"), params.load().variants
    verdict = artifacts.read_json(artifacts.GATE)["verdict"]
    assert text.startswith("# top\n<!-- results -->\nMeasured with SmolLM2-135M-Instruct.Q4_1.gguf by `make repro`")
    assert f"gate: **{verdict}**, the verdict of int8, which alone can block a merge" in text
    assert text.endswith("<!-- /results -->\nbelow\n") and len(text.split("\n")) < 28 + len(variants)
    lines = [line for line in text.split("\n") if line.startswith("| ")]
    table, apart = lines[: 1 + len(variants)], lines[1 + len(variants) :]
    assert [line.split(" | ")[0].strip("| ") for line in table] == ["variant", *variants]
    assert all(line.count(" | ") == 5 for line in table), "six columns"
    others = [name for name, v in variants.items() if v.engine != "hf" and name != "gguf-bf16"]
    assert [line.split(" | ")[0].strip("| ") for line in apart] == ["variant", *others], "engine and precision"
    assert "95 %" in text and "tokens" in text and "Noise floor" in text and "](reports/figures/tradeoff.svg)" in text
    assert "## " not in text and "README's part" not in text


def test_both_pages_have_the_same_order_and_the_sections_are_folded_on_one(written: Path) -> None:
    wording, html = pages(written)
    heads = re.findall(r"^## (.*)$", wording, re.MULTILINE)
    assert [h for h in re.findall(r"<details><summary><h2>(.*?)</h2>", html) if h != "Servers"] == heads
    assert heads == ["Quality", "Where it broke", "Speed and memory", "Noise and floors", "How to reproduce"]
    assert wording.count("<details>") == wording.count("</details>") == 1 and html.count("<details") == html.count("</details>")
    assert len(wording.split("\n")) <= 130 and len(html.encode()) < 1.5e6
    for page in (wording, html):
        advice, table, picture = (page.index(words) for words in ("quantgate track --promote", "quality loss", "tradeoff"))
        assert advice < table < picture


def test_both_pages_say_what_is_unknown_and_how_to_reproduce(written: Path) -> None:
    digest = artifacts.read_json(artifacts.metrics("int8"))["model"]
    for page in pages(written):
        for words in ("bf16 (16 bits)", "ominated", "quantgate bundle", digest, "no item changed"):
            assert words in page, words


def sentences(text: str) -> list[str]:
    return [s for part in text.split("\n\n") for s in re.split(r"(?<=[.?!:;·])\s+", " ".join(part.split()))]


class Prose(HTMLParser):
    """A page's text, without code, quotations and pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.said, self.depth = "", 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.depth += tag in self.QUOTED
        self.said += "\n\n" * (tag in self.BLOCKS)

    def handle_endtag(self, tag: str) -> None:
        self.depth -= tag in self.QUOTED
        self.said += "\n\n" * (tag in self.BLOCKS)

    def handle_data(self, data: str) -> None:
        self.said += data * (not self.depth)

    QUOTED = ("script", "style", "svg", "code", "blockquote", "dd")
    BLOCKS = ("p", "li", "td", "th", "h1", "h2", "h3", "summary", "caption", "figcaption", "small")


def test_no_sentence_has_more_than_30_words(written: Path) -> None:
    """On both pages and in a merge's comment; colons and semicolons end one, as on the pages of docs/."""
    settings = params.load()
    results, verdict = report.load_results(settings)
    said = comment.render(verdicts.Merge(verdict, results))
    wording, html = pages(written)
    page = Prose()
    page.feed(html)
    plain = re.compile(r"```.*?```|^[|!<#].*?$|<[^>]*>", re.MULTILINE | re.DOTALL)
    texts = {
        k: re.sub(r"^\s*(-|\d+\.|>) ", "\n\n", plain.sub("", t), flags=re.MULTILINE)
        for k, t in {"md": wording, "comment": said}.items()
    }
    for name, text in (texts | {"html": page.said}).items():
        assert len(sentences(text)) > 10, name
        assert [s for s in sentences(text) if len(s.split()) > 30] == [], name


def test_every_value_of_the_first_table_has_n_interval_and_method_at_a_second_look(written: Path) -> None:
    _, html = pages(written)
    body = html[html.index("<tbody>") : html.index("</tbody>")]
    cells = re.findall(r'<td title="([^"]*)" data-v="[^"]+">([^<]*)', body)
    results, _ = report.load_results(params.load())
    known = sum(r["metrics"][k]["value"] is not None for r in results.values() for k in ("kld_mean", "speed_ratio", "weight_bytes"))
    assert len(cells) >= known and all("n = " in tip and ("interval" in tip or "exact" in tip) for tip, _ in cells)
    kld = results["int8"]["metrics"]["kld_mean"]
    assert any(
        kld["method"] in tip and f"n = {kld['n']}" in tip and value.strip() == show(kld, interval=False) for tip, value in cells
    )


def test_a_warning_is_said_once_with_the_variants_it_concerns(reports: Path) -> None:
    for name, ms in (("bf16", 23.5), ("int8", 31)):
        warning = f"the clock of this machine jumped by {ms} ms"
        update(artifacts.metrics(name), lambda d, w=warning: d["metrics"]["speed_ratio"].update(warnings=[w]))
    report.write(params.load())
    wording, html = pages(reports)
    page = Prose()
    page.feed(html)
    for text in (wording, page.said):
        assert text.count("the clock of this machine") == 1 and "jumped by 23.5–31 ms: bf16, int8" in text


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
def test_the_printed_summary_says_on_top_what_is_stale_fits_100_columns_and_ends_with_what_to_do(
    written: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, changed: list[str]
) -> None:
    monkeypatch.setattr(freshness, "status", lambda: (changed, []))
    report.print_summary(params.load())
    printed = capsys.readouterr().out
    lines = printed.rstrip("\n").split("\n")
    files = "file-0, file-1, file-2, file-3, file-4, file-5, file-6, file-7 and 1 more"
    assert lines[0].startswith("STALE: ") is bool(changed)
    assert not changed or f"changed: {files}; run `dvc repro`" in " ".join(printed.split())
    assert max(len(line.rstrip()) for line in lines) <= 100 and "\x1b" not in printed
    assert [line.split(": ")[0] for line in lines[-3:]] == ["verdict", "next", "report"]


def test_a_variant_that_params_have_lost_since_the_verdict_is_left_out(
    reports: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(freshness, "status", lambda: (["params.yaml"], []))
    update(artifacts.GATE, lambda d: d["variants"].update(lost=d["variants"]["int8"]))
    report.print_summary(params.load())
    printed = capsys.readouterr().out
    assert printed.startswith("STALE: ") and "lost" not in printed


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
    assert f"{first}: {verdict['variants'][first]['verdict']} so far: " in printed
    assert [line.split(": ")[0] for line in printed.rstrip("\n").split("\n")[-3:]] == ["verdict", "next", "report"]
    assert f"next: {len(others)} more variants follow" in printed
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
    ours = html.replace(charts.library(), "")
    assert not re.search(r'\bsrc=|<link|@import|url\((?!#)|href="(?!#)', ours) and len(ours) < len(html)


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
    wording, html = pages(altered)
    texts = (wording, html.replace(charts.library(), ""), note, picture(altered, "tradeoff"))
    assert all("decode is bound by bandwidth" in page and "None" not in page for page in texts[:2])
    assert "it reads 1 MB" not in wording and 'title="decode is bound by bandwidth: it reads 1 MB"' in html, "at a second look"
    assert all("5 to 10 rounds" in text for text in texts)
    visible = re.sub(r' title="[^"]*"', "", "".join(texts))  # a tooltip has its value's own n
    assert not re.search(r"(?<!to )(?<!within )\b(5|10) rounds", visible)
    source = "(dequantized from MXFP4)"
    assert all("; dequantized from MXFP4; a note" in page for page in pages(altered))
    assert f"Reference: `bf16` {source}" in comment.render(verdicts.Merge(verdict, results))
    assert f"against `bf16` {source}" in note


# --- pictures ----------------------------------------------------------------------------------------------------


def test_every_picture_says_itself_in_words_has_a_unit_and_n_and_each_colour_can_be_seen_in_the_dark(written: Path) -> None:
    themed, dark = {light for light, _ in charts.THEME.values()}, charts.dark()
    assert all(dark.count(f'"{light}"') == 2 and dark.count(night) == 2 for light, night in charts.THEME.values())
    for name in DRAWN:
        svg = picture(written, name)
        assert re.search(r'<svg [^>]*role="img" aria-label="[^"]{20,}"', svg) and dark in svg, name
        assert "n = " in svg and ("nats" in svg or "MB" in svg), name
        used = set(re.findall(r'(?:fill|stroke)="(#[0-9a-f]{6}|[a-z]+)"', svg)) - {"none", "transparent"}
        assert used and used <= themed | set(charts.HUES), (name, used - themed)


def test_what_is_not_swapped_in_the_dark_has_contrast_in_both_themes() -> None:
    def luminance(colour: str) -> float:
        parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for ground in charts.THEME["page"]:
        for hue in charts.HUES:
            a, b = sorted((luminance(ground), luminance(hue)))
            assert (b + 0.05) / (a + 0.05) >= 3, (hue, ground, "as WCAG 2 asks of graphics")


def test_every_picture_with_bars_says_of_which_level_they_are(altered: Path) -> None:
    for name in ("tradeoff", "domains", "positions", "latency"):
        svg = picture(altered, name)
        assert "Bars: 90 % intervals" in svg and not re.search("95 %", svg), name
    _, page = pages(altered)
    page = page.replace(charts.library(), "")
    assert page.count("Bars: 90 % intervals") == 8 and "95 % interval" not in re.sub(r' title="[^"]*"', "", page), "each spec too"
    assert "one document, so no interval" in picture(altered, "domains")


def marks(spec: Any) -> list[str]:
    return [row["variant"] for row in spec["data"]["values"]]


def test_every_mark_of_the_trade_off_has_its_name_and_the_legend_its_size_and_verdict() -> None:
    results = {"bf16": result("bf16", 1.0, 0.0, 269)} | {f"int4-number-{k}": result("int4", 2.0, 0.3, 90) for k in range(9)}
    results["no-speed"] = result("int8", 2.0, 0.1, 143) | {"metrics": {}}
    verdict = {"variants": {name: judged("FAIL") for name in results if name != "bf16"}}
    spec = charts.tradeoff(results, verdict, "bf16", 0.95)
    svg, drawn = charts.svg(spec, "tradeoff"), [name for name in results if name != "no-speed"]
    assert marks(spec) == drawn and "no-speed" not in spec["description"] and "int4-number-8" in spec["description"]
    for name in drawn:
        assert f">{name}</text>" in svg and re.search(rf">{name} · \d+ MB · (FAIL|REFERENCE)[^<]*</text>", svg), name


def test_no_label_of_the_trade_off_lies_on_another_or_leaves_the_picture() -> None:
    x, y = {"type": "log", "domain": [0.5, 10.0]}, {"type": "symlog", "constant": 0.003, "domain": [0.0, 1.0]}
    at = {f"variant-{k}": (Known(2.0 + k / 20, (1.9, 2.5), 5), Known(0.3 + k / 50, None, 9)) for k in range(6)}
    at["at-the-edge"] = Known(9.9, None, 5), Known(0.001, None, 9)
    at["tall"] = Known(5.0, None, 5), Known(0.01, (0.004, 0.05), 9)
    width, boxes = charts.SIZE[0], []
    for name, (left, value, side) in charts.place(at, x, y, [0.02]).items():
        a = width * math.log(left / 0.5) / math.log(20)
        b = charts.SIZE[1] * math.log1p(value / 0.003) / math.log1p(1 / 0.003)
        long = charts.LETTER * len(name)
        boxes.append((a, b, a + long) if side == "right" else (a - long, b, a))
    assert all(left >= -0.01 and right <= width + 0.01 for left, _, right in boxes)
    tall, bound = width * math.log(10) / math.log(20), charts.SIZE[1] * math.log1p(0.02 / 0.003) / math.log1p(1 / 0.003)
    assert all(abs(b - bound) >= charts.LINE_HEIGHT / 2 for _, b, _ in boxes), "on the gate's bound"
    low, high = (charts.SIZE[1] * math.log1p(v / 0.003) / math.log1p(1 / 0.003) for v in (0.004, 0.05))
    assert not any(left < tall < right and low < b < high for left, b, right in boxes), "on an interval of KLD"
    for k, (left, b, right) in enumerate(boxes):
        for other_left, other_b, other_right in boxes[:k]:
            assert abs(b - other_b) >= charts.LINE_HEIGHT - 0.01 or left >= other_right or other_left >= right


def test_the_line_of_the_trade_off_joins_the_front_and_a_dominated_variant_is_hollow_grey() -> None:
    results = {"bf16": result("bf16", 1.0, 0.0, 269), "int8": result("int8", 4.0, 0.01, 90), "int4": result("int4", 2.0, 0.3, 100)}
    verdict = {"variants": {n: judged("PASS", reported.rule("kld_mean", "PASS")) for n in ("int8", "int4")}}
    spec = charts.tradeoff(results, verdict, "bf16", 0.95)
    at_bound = [layer for layer in spec["layer"] if layer["encoding"].get("y") == {"datum": 0.02} and "x" in layer["encoding"]]
    assert [layer["mark"]["text"] for layer in at_bound] == ["gate: at most 0.02 nats"]
    (line,) = [layer for layer in spec["layer"] if layer["mark"]["type"] == "line"]
    assert [p["speed"] for p in line["data"]["values"]] == [results[n]["metrics"]["speed_ratio"]["value"] for n in ("int8", "bf16")]
    assert recommendation.front(results) == ["int8", "bf16"]
    (points,) = [layer for layer in spec["layer"] if layer["mark"]["type"] == "point"]
    assert [row["verdict"] for row in spec["data"]["values"]] == ["REFERENCE", "PASS", "PASS, dominated"]
    fill, stroke = (points["encoding"][channel]["scale"]["range"][2] for channel in ("fill", "stroke"))
    assert (fill, stroke) == (charts.PAGE, charts.GREY)


def test_without_values_there_is_no_picture_and_an_empty_trade_off() -> None:
    results = {name: result(name, 1.0, 0.0, 269) | {"metrics": {}} for name in ("bf16", "int8")}
    assert charts.domains(results, "bf16", 0.95) is charts.positions(results, "bf16", 0.95) is charts.memory(results) is None
    assert charts.latency([], 0.95) is None
    empty = charts.tradeoff(results, {"variants": {}}, "bf16", 0.95)
    assert "no variant" in empty["description"] and marks(empty) == [] and "<svg" in charts.svg(empty, "tradeoff")


def test_latency_is_drawn_from_parts_of_metrics_and_from_what_was_served() -> None:
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
    spec = charts.latency(panels, 0.95)
    assert spec is not None and "TTFT by tokens of context" in spec["description"]
    svg = charts.svg(spec, "latency")
    assert svg.count(">int8<") == svg.count(">bf16<") == 1 and "TTFT (ms; n = 3)" in svg


def test_variants_stand_side_by_side_at_a_load_so_that_no_interval_lies_on_another() -> None:
    curves = {f"v{k}": [(x, metric(x / 2)) for x in (1.0, 2.0)] for k in range(8)}
    spec = charts.latency([Panel("TTFT", "ms", "sequences at once", curves)], 0.95)
    at = sorted({float(x) for x in re.findall(r'<path transform="translate\(([0-9.]+),', charts.svg(spec, "l"))})
    assert len(at) >= 16 and all(b - a > 2 for a, b in pairwise(at))


def test_an_interval_that_leaves_its_panel_ends_in_an_arrow_at_the_edge() -> None:
    wide, narrow = metric(100.0, 0.0, 1e4, n=2), metric(110.0, 108.0, 112.0, n=5)
    spec = charts.latency([Panel("TTFT", "ms", "sequences at once", {"int8": [(1.0, wide), (4.0, narrow)]})], 0.95)
    first, second = spec["data"]["values"]
    assert (first["low"], first["high"], first["cut_low"], first["cut_high"]) == (50.0, 220.0, True, True)
    assert (second["low"], second["high"], second["cut_low"], second["cut_high"]) == (108.0, 112.0, False, False)
    assert "100 [0, 10000]" in first["shown"], "the tooltip has all of it"
    assert "an arrow: the interval goes on" in charts.svg(spec, "latency")


def test_where_the_rounds_have_a_sweep_s_context_the_picture_takes_theirs_as_the_table_does() -> None:
    r = result("bf16", 1.0, 0.0, 269)
    r["metrics"] |= {"ttft_ms": around(100.0, n=10), "ttft_ms/context-256": around(90.0), "ttft_ms/context-1024": around(400.0)}
    curve = charts.sweeps({"bf16": r}, {}, 256)[0].curves["bf16"]
    assert curve == [(256, around(100.0, n=10)), (1024, around(400.0))]
    assert charts.sweeps({"bf16": r}, {}, 512)[0].curves["bf16"][0][1]["value"] == 90.0


# --- in a real browser -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = find()
    if program is None:
        pytest.skip("no Chromium on this machine: the page was not opened in a browser")
    with Browser(program, tmp_path_factory.mktemp("browser")) as opened:
        yield opened


def opened(browser: Browser, house: Path, width: int, height: int = 900, dark: bool = False) -> None:
    """Open the page and wait until each static picture has been replaced by the interactive one."""
    browser.open(house / "reports/report.html", width=width, height=height, dark=dark)
    browser.run(
        "new Promise(r => setInterval(() => document.querySelectorAll('[data-picture] > svg').length || r(), 50))"
        ".then(() => new Promise(r => setTimeout(r, 50)))"
    )


def inside(browser: Browser, selector: str) -> list[float]:
    """[left, top, right, bottom] of an element in the window."""
    box = f"(e => [e.left, e.top, e.right, e.bottom])(document.querySelector({selector!r}).getBoundingClientRect())"
    return [float(end) for end in browser.run(box)]


@pytest.mark.parametrize("width, height", [(1280, 800), (390, 844)])
def test_the_first_screen_has_verdict_advice_table_and_on_a_desk_the_picture(
    browser: Browser, written: Path, width: int, height: int
) -> None:
    opened(browser, written, width, height)
    seen = ["h1", ".advice", "pre", ".first thead"] + [".first tbody", ".first figure", "main > details summary"] * (width > 1000)
    for selector in seen:
        left, top, right, bottom = inside(browser, selector)
        assert left >= 0 and top >= 0 and bottom <= height and (right <= width or "thead" in selector), selector
    assert browser.run("document.querySelectorAll('.first thead th').length") <= 7
    size = "Math.min(...[...document.querySelectorAll('.first svg text')].map(e => e.getBoundingClientRect().height))"
    assert round(browser.run(size), 2) >= 9, "labels that can be read"


def test_pictures_answer_to_the_pointer(browser: Browser, written: Path) -> None:
    opened(browser, written, 1280, 800)
    middle = "(r => [r.left + r.width / 2, r.top + r.height / 2])"
    marks = "[...document.querySelectorAll('[data-picture=tradeoff] .mark-symbol.role-mark path')]"
    name = "gguf-q8_0"
    x, y = browser.run(f"{middle}({marks}.find(e => e.ariaLabel.includes('variant: {name}')).getBoundingClientRect())")
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    browser.run("new Promise(r => setTimeout(r, 100))")
    assert set(browser.run("[...document.querySelectorAll('tr.here')].map(r => r.dataset.variant)")) == {name}
    kld = show(report.load_results(params.load())[0][name]["metrics"]["kld_mean"])
    assert kld in browser.run("document.getElementById('vg-tooltip-element').innerText")
    labels = "[...document.querySelectorAll('[data-picture=tradeoff] .role-mark text')].map(e => e.textContent)"
    legend = "[...document.querySelectorAll('[data-picture=tradeoff] .role-legend-label text')]"
    entry = f"{legend}.find(e => e.textContent.startsWith('{name}'))"
    for there in (True, False, True):  # a click hides it, another shows it again
        assert (name in browser.run(labels)) is there
        x, y = browser.run(f"{middle}({entry}.getBoundingClientRect())")
        browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)  # off the tooltip
        browser.run("new Promise(r => setTimeout(r, 100))")
        for kind in ("mousePressed", "mouseReleased"):
            browser.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
        browser.run("new Promise(r => setTimeout(r, 100))")


def test_tables_sort_by_keyboard_and_filter_and_a_touched_value_tells_its_n(browser: Browser, written: Path) -> None:
    opened(browser, written, 1280)
    results, _ = report.load_results(params.load())
    sizes = {n: r["metrics"]["weight_bytes"]["value"] for n, r in results.items()}
    rows = "[...document.querySelector('table').tBodies[0].rows].filter(r => !r.hidden).map(r => r.dataset.variant)"
    for order in ("ascending", "descending"):
        browser.run("document.querySelectorAll('table th button')[2].focus()")
        browser.press("Enter")
        assert browser.run("document.querySelectorAll('table th')[2].ariaSort") == order
        assert browser.run(rows) == sorted(sizes, key=sizes.__getitem__, reverse=order == "descending")
    browser.run("(e => { e.value = 'GGUF'; e.dispatchEvent(new Event('input')) })(document.querySelector('input[type=search]'))")
    assert set(browser.run(rows)) == {n for n in results if "gguf" in n}
    browser.run("document.querySelector('table td[title]').click()")
    assert "n = " in browser.run("document.getElementById('note').innerText")


def test_without_javascript_each_picture_is_there(written: Path) -> None:
    _, html = pages(written)
    static = re.findall(r'data-picture="(\w+)"><svg', html)
    assert set(static) >= set(DRAWN) and html.count("data-picture=") == len(static)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_opens_in_a_browser_without_error_or_request_and_nothing_is_cut_off(
    browser: Browser, written: Path, dark: bool, width: int
) -> None:
    opened(browser, written, width, dark=dark)
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
    paper = browser.run("getComputedStyle(document.querySelector('figure svg')).backgroundColor")
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
        opened(browser, written, 1280, dark=dark)
        assert browser.run(script) >= 4.5, "dark" if dark else "light"


def test_the_page_is_printed_light_unfolded_and_fits_a_sheet_of_a4(browser: Browser, written: Path) -> None:
    width = 680  # CSS pixels of 210 mm less margins of 15 mm
    opened(browser, written, width, dark=True)
    folded = "[...document.querySelectorAll('main > details > :is(p, h3, ol, ul, figure, pre)')].map(e => e.checkVisibility())"
    assert not any(browser.run(folded))
    browser.call("Emulation.setEmulatedMedia", media="print", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    assert browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.run("getComputedStyle(document.querySelector('figure svg')).backgroundColor") == "rgb(255, 255, 255)"
    assert not browser.run("document.querySelector('input').checkVisibility()")
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
    opened(browser, written, 1280)
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
