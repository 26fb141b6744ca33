"""The trade-off as one table: precision x context x requests at once x speed x memory. Pure: figures in, rows out.

In process and behind a server are different measurements and stand in rows of their own: in process one engine answers and
nothing waits; a server's times hold HTTP, its scheduler and the queue. Bits per weight and KLD are the variant's, whichever
answers.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Metric = dict[str, Any]
Metrics = dict[str, Metric]
Show = Callable[..., str]

IN_PROCESS, SERVER = "in process", "server"
OWN = ("bits_per_weight", "kld_mean")  # a variant's own, however it is run
# column of the table -> metric in process (its part follows), metric of a server's level
FROM: dict[str, tuple[str | None, str | None]] = {
    "ttft_ms": ("ttft_ms", "ttft_p50_ms"),
    "ttft_p99_ms": (None, "ttft_p99_ms"),
    "tpot_ms": ("tpot_ms", "tpot_p50_ms"),
    "decode_tok_s": ("decode_tok_s", None),
    "throughput_tok_s": ("throughput_tok_s", "throughput_tok_s"),
    "memory_bytes": ("peak_memory_bytes", "server_memory_bytes"),
    "failure_rate": ("failure_rate", "failure_rate"),
    "attainment": (None, "attainment"),
}
MARK = " †"  # on a figure with a warning; the warnings stand below the table
ONCE = "measured once"  # the caption says it of all
SPEED = ("ttft_ms", "tpot_ms", "decode_tok_s", "peak_memory_bytes")  # a part with any of these in it is a row
PART = re.compile(r"(?:(?:context|batch)-\d+[/,+_-]?)+")
# what a probe looks for, in words
ABILITIES = {
    "stream_usage": "token counts in a stream", "one_token_an_event": "one token an event",
    "ignore_eos": "replies of forced length", "seed": "a seed that is honoured",
    "prompt_logprobs": "log-probabilities of a prompt by echo",
    "kld": "KLD over the whole vocabulary", "ppl": "perplexity",
    "delta_p": "change of the true token's probability",
}  # fmt: skip
COLUMNS = {  # of the table: (column of a point, scale)
    "bits/weight": ("bits_per_weight", 1.0), "TTFT (ms)": ("ttft_ms", 1.0), "TTFT p99 (ms)": ("ttft_p99_ms", 1.0),
    "TPOT (ms)": ("tpot_ms", 1.0), "decode tok/s": ("decode_tok_s", 1.0), "throughput tok/s": ("throughput_tok_s", 1.0),
    "memory (MB)": ("memory_bytes", 1e-6), "KLD (nats)": ("kld_mean", 1.0), "failed (%)": ("failure_rate", 100.0),
}  # fmt: skip
LEVEL = {
    "TTFT p50 (ms)": "ttft_p50_ms", "TTFT p95 (ms)": "ttft_p95_ms", "TTFT p99 (ms)": "ttft_p99_ms",
    "TPOT p50 (ms)": "tpot_p50_ms", "TPOT p99 (ms)": "tpot_p99_ms", "E2E p50 (ms)": "e2e_p50_ms", "E2E p99 (ms)": "e2e_p99_ms",
    "req/s": "throughput_req_s",
    "tok/s": "throughput_tok_s", "goodput (req/s)": "goodput_req_s",
}  # fmt: skip


@dataclass(frozen=True)
class Point:
    """One row. context: prompt tokens; load: `1`, `4` at once, or `0.5 req/s`; metrics: by column."""

    variant: str
    source: str
    context: int
    load: str
    metrics: dict[str, Metric | None]


CAPTION = (
    "Context: prompt tokens; in the benchmark's sweeps over it, prompt and reply together; where the rounds in turns with the "
    "reference have the same, the row is theirs. In process: one request after another; TTFT and TPOT are means over "
    "requests, decode tok/s counts tokens after the first, a batch's together. Server: "
    "medians over complete requests, and p99; throughput is output tokens over wall time, mean over rounds. Memory: peak of the "
    "process, or of the server's processes over all levels. Bits/weight and KLD are the variant's own, measured in process. "
    "Without brackets: too few values for an interval, or measured once. A dash: not measured there."
)


def view(
    results: dict[str, Any], served: dict[str, Any], faults: dict[str, str], prompts: tuple[int, int], confidence: float, show: Show
) -> dict[str, Any]:
    """What the pages show: rows as text, the caption, and what there is to say of servers; and the points themselves."""
    found = points(results, served, prompts)
    caption = f"Brackets are {100 * confidence:g} % intervals. {CAPTION}"
    told = {
        "rows": texts(found, show),
        "notes": notes(found),
        "caption": caption,
        "unknown": unknown(results),
        "servers": servers(served, faults, show),
    }
    return {"points": found, **told}


def points(results: dict[str, Any], served: dict[str, Any], prompts: tuple[int, int]) -> list[Point]:
    """Every row there are figures for, variant by variant. results: metrics/<variant>.json; served: serving/<variant>.json of
    those that were; prompts: tokens of a prompt in process where its metric does not say, of one request and of a batch."""
    found = []
    for name, result in results.items():
        found += _in_process(name, result["metrics"], prompts)
        found += _served(name, result["metrics"], served[name]) if name in served else []
    return found


def _in_process(name: str, m: Metrics, prompts: tuple[int, int]) -> list[Point]:
    """One row for each context and batch: the rounds' where a sweep came by the same one."""
    rows: dict[tuple[int, int], Point] = {}
    for part, known in _parts(m).items():
        if not known:
            continue
        context, batch = _place(part, prompts)
        tail = f"/{part}" if part else ""
        own = {column: m.get(f"{of}{tail}") if of else None for column, (of, _) in FROM.items()}
        row = Point(name, IN_PROCESS, context, str(batch), {k: m.get(k) for k in OWN} | own)
        rows.setdefault((context, batch), row)  # the rounds come first, and are surer than a sweep's few repetitions
    return list(rows.values())


def _parts(m: Metrics) -> dict[str, list[Metric]]:
    """{part: its speed figures that have a value}, in order of context and batch; "" is the requests without part."""
    found: dict[str, list[Metric]] = {}
    for key, metric in m.items():
        stem, _, part = key.partition("/")
        if stem in SPEED and (not part or PART.fullmatch(part)):
            found.setdefault(part, []).extend([metric] if metric["value"] is not None else [])
    return dict(sorted(found.items(), key=lambda kv: (*_sizes(kv[0]).values(), kv[0])))


def _sizes(part: str) -> dict[str, int]:
    said = dict(re.findall(r"(context|batch)-(\d+)", part))
    return {kind: int(said.get(kind, 0)) for kind in ("context", "batch")}


def _place(part: str, prompts: tuple[int, int]) -> tuple[int, int]:
    """(context, batch) of a metric's part. A sweep over batches has prompts of its own."""
    said = _sizes(part)
    return said["context"] or prompts[bool(said["batch"])], said["batch"] or 1


def unknown(results: dict[str, Any]) -> list[str]:
    """Contexts and batches that were asked for and not measured, with the reason; variants of one reason together."""
    by: dict[tuple[str, str], list[str]] = {}
    for name, result in results.items():
        for part in (p for p, known in _parts(result["metrics"]).items() if p and not known):
            said = [w for stem in SPEED for w in result["metrics"].get(f"{stem}/{part}", {}).get("warnings") or []]
            by.setdefault((part, said[0] if said else "no reason was kept"), []).append(name)
    return [f"{part} of {', '.join(names)}: {why}" for (part, why), names in by.items()]


def _served(name: str, m: Metrics, figures: dict[str, Any]) -> list[Point]:
    rows = []
    for level, own in figures["levels"].items():
        everything = own | {"server_memory_bytes": figures["server_memory_bytes"]}
        chosen = {column: everything.get(of) if of else None for column, (_, of) in FROM.items()}
        context = figures["asked"]["load"]["prompt_tokens"]
        rows.append(Point(name, SERVER, context, load_of(level), {k: m.get(k) for k in OWN} | chosen))
    return rows


def load_of(level: str) -> str:
    """`closed-4` as `4`, `open-0.5` as `0.5 req/s`."""
    kind, _, size = level.partition("-")
    return size if kind == "closed" else f"{size} req/s"


def texts(rows: list[Point], show: Show) -> list[dict[str, str]]:
    """Rows for a page. show(metric, scale=1): value with its interval, a dash where there is none."""
    found = []
    for row in rows:
        cells = {label: _cell(row.metrics[key], show, scale) for label, (key, scale) in COLUMNS.items()}
        place = {"variant": row.variant, "measured": row.source, "context": str(row.context), "at once": row.load}
        found.append({**place, **cells, "n": _counts(row)})
    return found


def _cell(metric: Metric | None, show: Show, scale: float) -> str:
    return show(metric, scale=scale) + (MARK if _warnings(metric) else "")


def _warnings(metric: Metric | None) -> list[str]:
    """What a reader should know of a figure that is there."""
    if not metric or metric["value"] is None:
        return []
    return [w for w in metric.get("warnings") or [] if not w.startswith(ONCE)]


def notes(rows: list[Point]) -> list[str]:
    """The warnings behind the marks, each with the figures that carry it."""
    found: dict[str, list[str]] = {}
    for row in rows:
        for label, (key, _) in COLUMNS.items():
            for warning in _warnings(row.metrics[key]):
                place = f"{row.source}, context {row.context}, {row.load} at once"
                found.setdefault(warning, []).append(f"{row.variant} {label} ({place})")
    return [f"{warning}: {', '.join(dict.fromkeys(of))}" for warning, of in found.items()]


def _counts(row: Point) -> str:
    """How many requests, and rounds where they are the unit of a rate."""
    ttft, rate = row.metrics["ttft_ms"], row.metrics["throughput_tok_s"]
    requests = f"{ttft['n']} requests" if ttft else "–"
    return f"{requests}, {rate['n']} rounds" if rate and row.source == SERVER else requests


def as_csv(rows: list[Point]) -> str:
    """All of it for a spreadsheet: each figure with its bounds and n; what is not known is empty."""
    columns = [*OWN[:1], *FROM, *OWN[1:]]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    head = [f"{c}{end}" for c in columns for end in ("", "_low", "_high", "_n")]
    writer.writerow(["variant", "measured", "context_tokens", "at_once", *head])
    for row in rows:
        cells = [(row.metrics[c] or {}).get(k) for c in columns for k in ("value", "low", "high", "n")]
        writer.writerow([row.variant, row.source, row.context, row.load, *cells])
    return out.getvalue()


def servers(served: dict[str, Any], faults: dict[str, str], show: Show) -> list[dict[str, Any]]:
    """For each variant that was to be served: what its server is, where its knee lies, what it lacks, and its levels."""
    found: list[dict[str, Any]] = [
        {"variant": name, "about": f"not measured: {why}", "build": None, "lacks": [], "levels": []} for name, why in faults.items()
    ]
    for name, figures in served.items():
        about = f"{_server(figures)}; {_knee(figures['knee'])}; {_memory(figures['server_memory_bytes'], show)}"
        about += f"; objective: {_objective(figures['asked'])}"
        about = about if figures["status"] == "ok" else f"{figures['status']}: {figures['reason']}; {about}"
        levels = [_level(level, own, show) for level, own in figures["levels"].items()]
        build = (figures["launch"] or {}).get("build")
        found.append({"variant": name, "about": about, "build": build, "lacks": lacks(figures["probe"]), "levels": levels})
    return found


def _server(figures: dict[str, Any]) -> str:
    launch, probe = figures["launch"], figures["probe"]
    if not launch:
        return f"{probe['model']} at {probe['url']} ({probe['api']})"
    own = "".join(f", {k} {v}" for k, v in launch.get("engine_options", {}).items())
    return f"{launch['kind']} started here ({launch['threads']} threads, {launch['parallel']} at once at most{own})"


def _knee(knee: Metric) -> str:
    if knee["value"] is None:
        return f"no knee: {'; '.join(knee['warnings'])}"
    return f"knee at {knee['value']:g} at once (single rounds: {knee['low']:g} to {knee['high']:g}; {knee['n']} rounds)"


def _objective(asked: dict[str, Any]) -> str:
    limits = {k: v for k, v in (asked.get("objective") or {}).items() if v is not None}
    return " and ".join(f"{k.removesuffix('_ms').upper()} at most {v:g} ms" for k, v in limits.items()) or "none stated"


def _memory(memory: Metric, show: Show) -> str:
    if memory["value"] is None:
        return f"memory not known: {'; '.join(memory['warnings'])}"
    return f"peak memory {show(memory, scale=1e-6)} MB (n = 1, no interval)"


def _level(level: str, own: Metrics, show: Show) -> dict[str, str]:
    kind = "at once" if level.startswith("closed") else ""
    failed, counted = own["failure_rate"], f"{own['ttft_p50_ms']['n']} requests, {own['throughput_req_s']['n']} rounds"
    shown = {"load": f"{load_of(level)} {kind}".strip(), **{label: show(own.get(name)) for label, name in LEVEL.items()}}
    within, bad = show(own.get("attainment"), scale=100), show(failed, scale=100)
    return {**shown, "within objective (%)": within, "failed (%)": bad, "n": counted}


def lacks(probe: dict[str, Any]) -> list[str]:
    """What a server was found to lack, or could not be found to have, in words; findings of one reason together."""
    by: dict[tuple[bool, str], list[str]] = {}
    for key, words in ABILITIES.items():
        finding = probe.get(key) or {"value": None, "reason": "not looked for"}
        if not finding["value"]:
            by.setdefault((finding["value"] is None, finding["reason"]), []).append(words)
    told = {False: "no {}", True: "whether it has {} is not known"}
    return [f"{told[unknown].format(_joined(words))}: {why}" for (unknown, why), words in by.items()]


def _joined(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
