"""The report's pictures as Vega-Lite specifications, each for the static SVG and the interactive picture.

Never without a unit, n and an interval; a verdict is a marker and a word. Each function returns a specification, whose description
is the picture's alternative text, or None if there are no values.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from itertools import cycle
from typing import NamedTuple

from pipeline.core.records import Json, Metric, Metrics, Results, Sensitivity, ServerReport, Span, Verdict
from pipeline.metrics import definitions
from pipeline.reporting import recommendation
from pipeline.reporting.text import Known, counted, known, n_of, show, value_of

Curve = list[tuple[float, Metric]]  # (load or position, value)
# name: (light, dark), swapped by CSS on a dark screen. A picture's other colours are HUES, which can be seen on both.
THEME = {
    "ink": ("#1b1f24", "#e6edf3"), "soft": ("#59636e", "#9198a1"), "line": ("#d1d9e0", "#3d444d"), "page": ("#ffffff", "#0d1117"),
    "pass": ("#1a7f37", "#3fb950"), "fail": ("#b42318", "#ff7b72"), "unsure": ("#9a6700", "#d29922"),
    "grey": ("#8c959f", "#7d8590"), "reference": ("#0b57a4", "#58a6ff"),
}  # fmt: skip
INK, SOFT, LINE, PAGE, GREY, BLUE, AMBER, RED = (
    THEME[k][0] for k in ("ink", "soft", "line", "page", "grey", "reference", "unsure", "fail")
)
HUES = ("#2f81f7", "#c4620d", "#1f9d55", "#c2407a", "#8a63d2", "#0f8f9c", "#96760b", "#d1443c")
SHAPES = ("circle", "square", "diamond", "triangle-up", "cross", "triangle-down", "triangle-right", "triangle-left")
MARKS = {
    "PASS": ("circle", "pass"), "FAIL": ("cross", "fail"), "INCONCLUSIVE": ("diamond", "unsure"),
    "REFERENCE": ("square", "reference"),
}  # fmt: skip
AXIS = {"labelColor": SOFT, "titleColor": INK, "gridColor": LINE, "domainColor": SOFT, "tickColor": SOFT, "labelFontSize": 11,
        "titleFontSize": 11, "titleFontWeight": "normal", "labelFlush": False}  # fmt: skip
CONFIG = {
    "font": "system-ui, sans-serif", "background": PAGE, "view": {"stroke": LINE}, "axis": AXIS,
    "legend": {"labelColor": INK, "titleColor": INK, "labelFontSize": 11, "orient": "bottom", "labelLimit": 260, "title": None,
               "unselectedOpacity": 1},
    "header": {"labelColor": INK, "labelFontSize": 11, "labelFontWeight": "bold", "title": None},
    "title": {"color": SOFT, "fontSize": 11, "fontWeight": "normal", "anchor": "start", "subtitleColor": SOFT, "orient": "bottom"},
}  # fmt: skip
SIZE = (420, 310)  # pixels of the trade-off
LETTER, LINE_HEIGHT, BESIDE = 7.2, 15.0, 9  # pixels of a label, and from a mark's middle to its edge
KINDS = {"corpus": "texts", "trajectory": "the reference's own continuations"}
MEMORY = {"weight_bytes": "weights on disk", "load_memory_bytes": "peak while loading", "peak_memory_bytes": "peak while serving"}
# panels of `latency`: (title, unit, start of the metrics' names)
SWEEPS = (
    ("TTFT", "ms", "ttft_ms/context-"), ("TPOT", "ms", "tpot_ms/context-"), ("TPOT", "ms", "tpot_ms/batch-"),
    ("decode rate, all together", "tok/s", "decode_tok_s/batch-"),
    ("TTFT p50, server", "ms", "ttft_p50_ms/closed-"), ("TPOT p50, server", "ms", "tpot_p50_ms/closed-"),
    ("throughput, server", "tok/s", "throughput_tok_s/closed-"),
)  # fmt: skip
AXES = {"context": "tokens of context", "batch": "sequences at once", "closed": "requests at once"}
LARGE: Json = {"labelFontSize": 13, "titleFontSize": 13}
ONCE: Json = {"data": {"values": [{}]}}  # a mark of no variant
# a click in the legend hides a variant, another shows it again
HIDE = {"name": "hidden", "select": {"type": "point", "fields": ["variant"], "toggle": "true"}, "bind": "legend"}
HIDDEN = {"labelColor": {"expr": f"hidden.variant && indexof(hidden.variant, datum.value) >= 0 ? '{GREY}' : '{INK}'"}}
ROOM = 2.0  # a panel shows intervals up to so many times the greatest value, and down to that part of the least


class Panel(NamedTuple):
    """A metric against one kind of load (`axis`)."""

    title: str
    unit: str
    axis: str
    curves: dict[str, Curve]  # by variant


# ---- what all pictures share -------------------------------------------------------------------------------------------------


def svg(spec: Json, name: str) -> str:
    """The static picture, with alternative text and both themes; equal values give equal bytes."""
    import vl_convert

    drawn = vl_convert.vegalite_to_svg(spec)
    for k, old in enumerate(dict.fromkeys(re.findall(r'\bid="([^"]+)"', drawn))):  # vl_convert counts on over a process's pictures
        drawn = re.sub(rf'(?<=[#"]){old}(?=[)"])', f"{name}-{k}", drawn)
    drawn = re.sub(r' (aria|role)[\w-]*="[^"]*"| class="(?!marks")[^"]*"', "", drawn)
    drawn = re.sub(r' (stroke-miterlimit|stroke-width|opacity|pointer-events|transform)="(10|1|none|translate\(0,0\))"', "", drawn)
    drawn = re.sub(r'<path d="[^"]*"( display="none")?/>', "", drawn)  # has no colour
    for font in (fonts := (f' font-family="{CONFIG["font"]}"', ' font-size="11px"')):
        drawn = drawn.replace(font, "")
    drawn = re.sub(r' (d|transform|x2|y2)="[^"]*"', lambda at: re.sub(r"\d+\.\d{2,}", lambda m: f"{float(m[0]):.1f}", at[0]), drawn)
    shared = f'class="chart"{"".join(fonts)} role="img" aria-label="{html.escape(spec["description"])}"'
    return drawn.replace('class="marks"', shared, 1).replace("><", f">{style()}<", 1)


def style() -> str:
    return f"<style>{dark()}</style>"


def png(spec: Json) -> bytes:
    """The light picture, for pages that show no SVG."""
    import vl_convert

    return bytes(vl_convert.vegalite_to_png(spec, scale=1.5))


@cache
def library() -> str:
    """Vega, Vega-Lite and Vega-Embed for a page without a network."""
    import vl_convert

    return str(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;"))


def dark() -> str:
    """CSS that swaps the theme's colours on a dark screen."""
    rules = (f'.chart [{of}="{light}"]{{{of}:{night}}}' for light, night in THEME.values() for of in ("fill", "stroke"))
    return f"@media screen and (prefers-color-scheme:dark){{{''.join(rules)}}}"


def level(confidence: float) -> str:
    return f"Bars: {100 * confidence:g} % intervals"


def _spec(alt: str, note: str | list[str], body: Json, rows: list[Json]) -> Json:
    """A whole specification. note: the text below the picture."""
    return {"description": alt, "title": {"text": note}, "data": {"values": rows}, "config": CONFIG, **body}


def _row(metric: Metric | Span, factor: float = 1.0, **more: object) -> Json:
    """A value with its interval, and its tooltip."""
    value, interval, n = known(metric) or Known(0.0, None, 0)
    low, high = interval or (value, value)
    at = {k: float(f"{v * factor:.5g}") for k, v in (("value", value), ("low", low), ("high", high))}
    return {**at, "whole": interval is not None, "shown": show(metric), "n": n, **more}


def _tip(**titles: str) -> list[Json]:
    """Fields of a tooltip: those of every value, and titles: {field: title}."""
    return [{"field": k, "title": t} for k, t in ({"shown": "value [interval]"} | titles | {"n": "n"}).items()]


def _quantity(field: str, **more: object) -> Json:
    return {"field": field, "type": "quantitative", **more}


def _names(field: str, domain: Iterable[str], marks: Iterable[str], **more: object) -> Json:
    """A channel (colour, shape) by name; `marks` are used again if there are more names."""
    names = list(domain)
    scale = {"domain": names, "range": [mark for mark, _ in zip(cycle(marks), names)]}
    return {"field": field, "type": "nominal", "scale": scale, **more}


def _value(axis: str, scale: Json, title: str | None, field: str = "value", **of_axis: object) -> Json:
    return {axis: _quantity(field, scale=scale | {"nice": False}, title=title, axis={"format": "~g"} | of_axis)}


def _layer(mark: str, encoding: Json, more: Json | None = None, **of_mark: object) -> Json:
    return {"mark": {"type": mark, **of_mark}, "encoding": encoding, **(more or {})}


def _layers(along: str, point: Json, across: Json, **of_mark: object) -> list[Json]:
    """Values with their intervals along an axis, hollow if they have none. across: the other axis."""
    color = point.pop("color")
    hollow = {"condition": {"test": "!datum.whole", "value": PAGE}, **{k: v for k, v in color.items() if k != "legend"}}
    ends = {along: _quantity("low"), f"{along}2": {"field": "high"}, "color": color}
    style: Json = {"size": 36, "strokeWidth": 1, "opacity": 1} | of_mark
    dot = _layer("point", point | across | {"stroke": color, "fill": hollow}, **style)
    return [_layer("rule", ends | across, strokeWidth=1, clip=True), dot]


def _kld_scale(values: list[float], linear: float | None = None) -> Json:
    """A logarithmic scale; one with 0 if a value is 0; linear below `linear`."""
    above = [v for v in values if v > 0] or [1.0]
    if linear is None and min(values, default=0) > 0:
        return {"type": "log", "domain": [min(above) / 1.5, max(above) * 1.5]}
    constant = linear or min(above)
    return {"type": "symlog", "constant": constant, "domain": [0 if linear is None else -constant / 4, max([*above, constant]) * 2]}


def _ticks(scale: Json, steps: Iterable[float] = (1,)) -> list[float]:
    """Round numbers: 0, and steps times powers of ten."""
    low, high = scale["domain"]
    least = scale.get("constant", low)
    powers = range(math.floor(math.log10(least)), math.ceil(math.log10(high)) + 1)
    ticks = [float(f"{s}e{k}") for k in powers for s in steps]
    return [0.0] * (low <= 0) + [t for t in ticks if least <= t <= high]


# ---- quality against speed ---------------------------------------------------------------------------------------------------


def tradeoff(results: Results, verdict: Verdict, reference: str, confidence: float) -> Json:
    """Quality (KLD) against decode speed (the ratio to the reference in the same run), a named mark for each variant, area by file
    size. The line joins the least KLD at each speed. A click in the legend hides a variant."""
    behind = {n for n, d in recommendation.dominated(results, reference).items() if d.sure}
    at = recommendation.measured(results)
    limit = definitions.floor_limit("kld_mean", results[reference]["metrics"])
    rules = [r for v in verdict["variants"].values() for r in v["rules"] if r["required"] and r["metric"] == "kld_mean"]
    allowed = sorted({r["threshold"] for r in rules if r["against"] == "reference"})
    y = _kld_scale([*(kld.value for _, kld in at.values()), *allowed], limit or 1e-5)
    speeds = [speed.value for speed, _ in at.values()] or [1.0]
    x: Json = {"type": "log", "domain": [min(speeds) / 1.6, max(speeds) * 1.6]}
    rows, drawn, says = [], [], {}
    for name, (x_label, y_label, side) in place(at, x, y, allowed, limit).items():
        metrics, word = results[name]["metrics"], "REFERENCE" if name == reference else verdict["variants"][name]["verdict"]
        shape, colour = MARKS.get(word, ("triangle-up", "grey"))
        speed, size, grey = at[name][0], value_of(results[name], "weight_bytes"), name in behind
        ink, word = THEME["grey" if grey else colour][0], word + ", dominated" * grey
        ends = dict(zip(("slow_end", "fast_end"), speed.interval or (speed.value, speed.value)))
        rows.append(_row(metrics["kld_mean"], variant=name, verdict=word, speed=speed.value, bytes=size or 0.0, ink=ink,
                         mb=show(metrics.get("weight_bytes")), fast=show(metrics["speed_ratio"]), rounds=speed.n, x_label=x_label,
                         y_label=y_label, side=side, **ends))  # fmt: skip
        drawn.append((ink, PAGE if grey else ink, shape))
        says[name] = " · ".join(filter(None, (name, f"{size / 1e6:.0f} MB" if size else "", word)))
    inks, fills, shapes = zip(*drawn) if drawn else ([""], [""], [""])
    front = [{"speed": at[name][0].value, "value": at[name][1].value} for name in recommendation.front(results)]
    legend = HIDDEN | {"labelExpr": f"{json.dumps(says)}[datum.label]", "columns": 2}
    n = {key: n_of(results, key) for key in ("speed_ratio", "kld_mean")}
    title = f"decode rate, times {reference}'s in the same run (n = {n['speed_ratio']} rounds)"
    across = _value("x", x, title, "speed", values=_ticks(x, (1, 2, 5)), **LARGE)
    up = _value("y", y, f"mean KLD to {reference}, nats (n = {n['kld_mean']} tokens)", values=_ticks(y), **LARGE)
    raw = {"field": "ink", "type": "nominal", "scale": None, "legend": None}
    mark = {
        "stroke": _names("variant", at, inks, legend=legend), "fill": _names("variant", at, fills, legend=legend),
        "shape": _names("variant", at, shapes, legend=legend),
        "size": _quantity("bytes", scale={"rangeMin": 30, "rangeMax": 260, "zero": True}, legend=None),
        "tooltip": _tip(shown="KLD, nats", variant="variant", verdict="verdict", fast=f"decode, × {reference}", rounds="rounds",
                        mb="size, MB"),
    }  # fmt: skip
    line = {"interpolate": "step-before", "strokeDash": [4, 3], "strokeWidth": 1, "color": SOFT}
    name_of = {"text": {"field": "variant"}, "color": {"value": INK}, "x": _quantity("x_label"), "y": _quantity("y_label")}
    layers = [
        *_band(limit),
        *(layer for most in allowed for layer in _bound(most)),
        _layer("line", across | up, {"data": {"values": front}}, **line),
        _layer("rule", across | {"y": _quantity("low"), "y2": {"field": "high"}, "color": raw}, _shown(), strokeWidth=1, clip=True),
        _layer(
            "rule", up | {"x": _quantity("slow_end"), "x2": {"field": "fast_end"}, "color": raw}, _shown(), strokeWidth=1, clip=True
        ),
        _layer("point", across | up | mark, _shown() | {"params": [HIDE]}, strokeWidth=1.5, opacity=1),
        *(
            _layer("text", name_of, _shown(f"datum.side == '{side}'"), fontSize=13, align=align, baseline="middle")
            for side, align in (("right", "left"), ("left", "right"))
        ),
    ]
    alt = f"Mean KLD to {reference} against decode speed, for {', '.join(at) or 'no variant'}; the table has the values."
    note = ["Best: right and low. Area: file size. Dashed: least KLD at a speed.", f"{level(confidence)}. Hollow grey: dominated."]
    return _spec(alt, note, {"width": SIZE[0], "height": SIZE[1], "layer": layers}, rows)


def _shown(*filters: str) -> Json:
    """Only variants that are not hidden."""
    return {"transform": [{"filter": kept} for kept in ({"not": {"param": "hidden", "empty": False}}, *filters)]}


def _band(limit: float | None) -> list[Json]:
    """Shade mean KLD that cannot be told from zero."""
    if not limit:
        return []
    words = f"{definitions.FLOOR_MARK}: below {limit:.2g} nats ({definitions.FLOOR_TIMES} × noise)"
    band = _layer("rect", {"y": {"datum": 0}, "y2": {"datum": limit}}, ONCE, color=BLUE, opacity=0.1)
    return [band, _words(limit, SIZE[0], words, "right", BLUE)]


def _bound(most: float) -> list[Json]:
    """Draw the gate's bound of mean KLD."""
    rule = _layer("rule", {"y": {"datum": most}}, ONCE, color=RED, strokeDash=[2, 2])
    return [rule, _words(most, 2, f"gate: at most {most:g} nats", "left", RED)]


def _words(y: float, x: int, words: str, align: str, color: str) -> Json:
    """A text just above a height of the picture."""
    at = {"y": {"datum": y}, "x": {"value": x}}
    return _layer("text", at, ONCE, text=words, align=align, baseline="bottom", dy=-2, fontSize=11, color=color)


def place(
    marks: Mapping[str, tuple[Known, Known]], x: Json, y: Json, allowed: Iterable[float] = (), limit: float | None = None
) -> dict[str, tuple[float, float, str]]:
    """{name: (x, y, side)} of labels beside their marks, clear of other labels, marks, intervals, and the words of the bounds
    (`allowed`) and of the floor (`limit`). side: of the mark."""
    (across, speed_at), (up, kld_at) = _axis(x, SIZE[0]), _axis(y, SIZE[1])
    at = {n: (across(a.value), up(b.value)) for n, (a, b) in marks.items()}
    taken = [(a - BESIDE, b - BESIDE, a + BESIDE, b + BESIDE) for a, b in at.values()]
    for name, (speed, kld) in marks.items():
        a, b = at[name]
        ends = [across(end) for end in speed.interval or () if end > 0]
        taken += [(min(ends), b - 2, max(ends), b + 2)] if ends else []
        ends = [up(end) for end in kld.interval or () if end > 0 or "constant" in y]
        taken += [(a - 2, min(ends), a + 2, max(ends))] if ends else []
    for bound in allowed:
        b = up(bound)
        taken += [(0.0, b, 150.0, b + LINE_HEIGHT), (0.0, b - 1, SIZE[0], b + 1)]  # upwards
    if limit:
        b = up(limit)
        taken.append((SIZE[0] - 240.0, b, SIZE[0], b + LINE_HEIGHT))
    labels = {}
    for name, (a, b) in at.items():
        wide, choices = LETTER * len(name), []
        for away in (away for step in range(11, 62, 10) for away in (step, -step)):
            for side, left in (("right", a + BESIDE + 2), ("left", a - BESIDE - 2 - wide)):
                box = (left, b + away - LINE_HEIGHT / 2, left + wide, b + away + LINE_HEIGHT / 2)
                inside = box[0] >= 0 and box[2] <= SIZE[0] and box[1] >= 0 and box[3] <= SIZE[1]
                free = not any(box[0] < t[2] and t[0] < box[2] and box[1] < t[3] and t[1] < box[3] for t in taken)
                choices.append((not (inside and free), box, side, away))
        _, box, side, away = min(choices, key=lambda choice: choice[0])
        taken.append(box)
        edge = box[0] if side == "right" else box[2]
        labels[name] = speed_at(edge), kld_at(b + away), side
    return labels


def _axis(scale: Json, length: int) -> tuple[Callable[[float], float], Callable[[float], float]]:
    """(pixel of a value, value of a pixel) along an axis of Vega's scale `log` or `symlog`."""
    c = scale.get("constant")

    def bent(value: float) -> float:
        return math.copysign(math.log1p(abs(value) / c), value) if c else math.log(value)

    def straight(value: float) -> float:
        return math.copysign(c * math.expm1(abs(value)), value) if c else math.exp(value)

    low, high = map(bent, scale["domain"])
    return lambda value: length * (bent(value) - low) / (high - low), lambda at: straight(low + (high - low) * at / length)


# ---- divergence by domain and by position, and memory ------------------------------------------------------------------------


def domains(results: Results, reference: str, confidence: float) -> Json | None:
    """Mean KLD by domain, a panel for each variant; hollow if one document gives no interval."""
    found = {
        name: {k.partition("/")[2]: m for k, m in r["metrics"].items() if k.startswith("kld_mean/") and ":" not in k and known(m)}
        for name, r in results.items() if name != reference
    }  # fmt: skip
    label = {d: f"{d} (n = {n_of(results, f'kld_mean/{d}')})" for by in found.values() for d in by}
    rows = [_row(m, variant=name, domain=label[d]) for name, by in found.items() for d, m in by.items()]
    if not rows:
        return None
    scale = _kld_scale([r["value"] for r in rows])
    down = {"y": {"field": "domain", "type": "nominal", "title": None, "sort": sorted(label.values())}}
    point = {"color": {"value": BLUE}, "tooltip": _tip(variant="variant", domain="domain")}
    layer = _layers("x", point | _value("x", scale, None, values=_ticks(scale)), down)
    names = [n for n, by in found.items() if by]
    body = _facet(names, {"width": 170, "height": 15 * len(label), "layer": layer})
    note = f"Mean KLD to {reference}, nats; n in tokens. {level(confidence)}; hollow: one document, so no interval"
    return _spec(f"Mean KLD to {reference} by domain, a panel a variant: {', '.join(names)}.", note, body, rows)


def positions(results: Results, reference: str, confidence: float) -> Json | None:
    """Mean KLD by position in texts and in the reference's own continuations, a panel for each variant."""
    rows: list[Json] = []
    for name, r in results.items():
        for kind, spans in sorted(r["curves"].get("kld_by_position", {}).items() if name != reference else ()):
            where: Json = {"variant": name, "kind": KINDS.get(kind, kind)}
            rows += (
                _row(span, at=math.sqrt(span["from"] * span["to"]), span=f"{span['from']} to {span['to']}", **where)
                for span in spans if span["value"] is not None
            )  # fmt: skip
    if not rows:
        return None
    y = _kld_scale([v for r in rows for v in (r["value"], r["high"], *[r["low"]][: r["low"] > 0])])
    for row in rows:
        row["low"] = max(row["low"], y["domain"][0])  # the scale ends there
    x: Json = {"type": "log", "domain": [min(r["at"] for r in rows) / 1.5, max(r["at"] for r in rows) * 1.5]}
    across = _value("x", x, None, "at", values=_ticks(x, (1, 2, 5))[::2])
    up, color = _value("y", y, None, values=_ticks(y)), _names("kind", KINDS.values(), [BLUE, AMBER])
    point = up | {"color": color, "shape": _names("kind", KINDS.values(), SHAPES)}
    point["tooltip"] = _tip(variant="variant", kind="in", span="position")
    layer = [_layer("line", across | up | {"color": color}, strokeWidth=1), *_layers("y", point, across)]
    names, n = list(dict.fromkeys(r["variant"] for r in rows)), f"n = {counted(r['n'] for r in rows)} tokens a point"
    note = f"Across: position (tokens). Up: mean KLD to {reference}, nats; {n}. {level(confidence)}"
    alt = f"Mean KLD to {reference} by position, a panel a variant: {', '.join(names)}; {n}."
    return _spec(alt, note, _facet(names, {"width": 200, "height": 150, "layer": layer}), rows)


def memory(results: Results) -> Json | None:
    """File size and peak resident memory of each variant, in MB, measured once: no interval."""
    rows = [
        _row(m, 1e-6, variant=name, what=what)
        for name, r in results.items() for key, what in MEMORY.items() if (m := r["metrics"].get(key)) and known(m)
    ]  # fmt: skip
    if not rows:
        return None
    names = list(dict.fromkeys(r["variant"] for r in rows))
    down = {"y": {"field": "variant", "type": "nominal", "title": None, "sort": names}}
    point = {"color": _names("what", MEMORY.values(), HUES), "shape": _names("what", MEMORY.values(), SHAPES[1:])}
    point |= _value("x", {"zero": True}, "MB", format="d") | {"tooltip": _tip(variant="variant", what="what")}
    body = {"width": 470, "height": 22 * len(names), "layer": _layers("x", point, down, size=60)}
    note = "Filled: exact, or with an interval. Hollow: the highest of one process (n = 1), so no interval."
    return _spec(f"Weights and peak memory in MB of {', '.join(names)}.", note, body, rows)


def _facet(names: list[str], spec: Json) -> Json:
    return {"facet": {"field": "variant", "type": "nominal", "sort": names}, "columns": 3, "spec": spec}


# ---- latency against context and load ----------------------------------------------------------------------------------------


def sweeps(results: Results, serving: Mapping[str, ServerReport], prompt_tokens: int) -> list[Panel]:
    """Panels of metrics measured at two loads or more. serving: {variant: its server's results}, whose levels count as parts of a
    metric. prompt_tokens: of the rounds; they replace a sweep's value at this context, since they have more repetitions."""
    metrics = {name: dict(r["metrics"]) for name, r in results.items()}
    for name, report in serving.items():
        metrics[name] |= {f"{metric}/{load}": m for load, by_name in report["levels"].items() for metric, m in by_name.items()}
    panels = []
    for title, unit, start in SWEEPS:
        curves = {name: curve for name, own in metrics.items() if len(curve := _curve(own, start, prompt_tokens)) > 1}
        if curves:
            panels.append(Panel(title, unit, AXES[start.split("/")[1].rstrip("-")], curves))
    return panels


def _curve(metrics: Metrics, start: str, prompt_tokens: int) -> Curve:
    """Points of metrics such as `ttft_ms/context-1024`, in order."""
    rounds = metrics.get(start.removesuffix("/context-"))
    same = f"{start}{prompt_tokens}"
    if rounds and rounds["value"] is not None and same in metrics:
        metrics = metrics | {same: rounds}
    points = [(float(k.removeprefix(start)), m) for k, m in metrics.items() if k.startswith(start) and known(m)]
    return sorted(points, key=lambda point: point[0])


def latency(panels: list[Panel], confidence: float) -> Json | None:
    """Latency and rate against context and load: a panel for each metric, a line for each variant, side by side at a load."""
    if not panels:
        return None
    names = list(dict.fromkeys(name for panel in panels for name in panel.curves))
    rows: list[Json] = []
    for panel in panels:
        n = counted(m["n"] for curve in panel.curves.values() for _, m in curve)
        title = f"{panel.title} ({panel.unit}; n = {n}) by {panel.axis}"
        rows += _within([_row(m, variant=name, panel=title, load=load) for name, c in panel.curves.items() for load, m in c])
    hue, sorts = _names("variant", names, HUES), {"panel": list(dict.fromkeys(r["panel"] for r in rows)), "variant": names}
    across: Json = {
        "x": {"field": "load", "type": "ordinal", "title": None, "axis": {"labelAngle": 0}},
        "xOffset": {"field": "variant", "type": "nominal", "sort": sorts["variant"]},
    }
    up = _value("y", {"type": "log"}, None, tickCount=4, grid=False)
    color = hue | {"legend": HIDDEN | {"columns": 4}}
    point = up | {"color": color, "shape": _names("variant", names, SHAPES), "tooltip": _tip(variant="variant", load="at")}
    rule, dot = _layers("y", point, across)
    layer = [
        _layer("line", across | up | {"color": color}, strokeWidth=0.7, opacity=0.7),
        rule,
        dot | {"params": [HIDE]},
        *(
            _layer("point", across | {"y": _quantity(end), "color": hue}, {"transform": [{"filter": f"datum.cut_{end}"}]},
                   shape=f"triangle-{way}", size=22, filled=True)
            for end, way in (("low", "down"), ("high", "up"))
        ),
    ]  # fmt: skip
    body = _shown() | {
        "facet": {"field": "panel", "type": "nominal", "sort": sorts["panel"]}, "columns": 2,
        "spec": {"width": 300, "height": 190, "layer": layer},
        "resolve": {"scale": dict.fromkeys(("x", "xOffset", "y"), "independent")},
    }  # fmt: skip
    note = f"{level(confidence)}; an arrow: the interval goes on; hollow: it has none"
    alt = "Latency and rate against load: " + "; ".join(f"{panel.title} by {panel.axis}" for panel in panels)
    return _spec(alt, note, body, rows)


def _within(rows: list[Json]) -> list[Json]:
    """Cut intervals to what a panel shows, and mark which ends."""
    above = [r for r in rows if r["value"] > 0]
    least = min((r["value"] for r in above), default=0.0) / ROOM
    most = max((r["value"] for r in above), default=0.0) * ROOM
    cut = ({"cut_low": r["low"] < least, "cut_high": r["high"] > most} for r in above)
    return [r | {"low": max(r["low"], least), "high": min(r["high"], most), **ends} for r, ends in zip(above, cut)]


def sensitivity(table: Sensitivity) -> Json:
    """A heat map of the mean KLD of each group of each layer alone at the lowest level."""
    inside = [row for row in table["groups"] if row["layer"] is not None]
    kinds, lowest = list(dict.fromkeys(row["kind"] for row in inside)), table["levels"][0]
    rows: list[Json] = [
        {"layer": row["layer"], "kind": row["kind"], "kld": max(row["alone"]["value"] or 0.0, 0.0), "name": row["name"]}
        for row in inside
    ]
    outside = ", ".join(f"{row['name']} {row['alone']['value'] or 0.0:.4f}" for row in table["groups"] if row["layer"] is None)
    alt = f"Mean KLD of {len(inside)} groups, each alone at {lowest}, by layer and kind"
    color = {"field": "kld", "type": "quantitative", "scale": {"scheme": "oranges", "type": "sqrt"}, "title": "nats"}
    body: Json = {
        "width": {"step": 16}, "height": {"step": 22}, "mark": {"type": "rect", "stroke": LINE},
        "encoding": {
            "x": {"field": "layer", "type": "ordinal", "title": "layer"}, "color": color,
            "y": {"field": "kind", "type": "nominal", "sort": kinds, "title": None},
            "tooltip": [{"field": "name"}, {"field": "kld"}],
        },
    }  # fmt: skip
    return _spec(alt, f"{alt}; outside the layers: {outside} nats", body, rows)
