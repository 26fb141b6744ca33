"""The trade-off as one table: precision x context x requests at once x speed x memory.

In process and behind a server are different measurements and stand in rows of their own: in process one engine answers and
nothing waits; a server's times include HTTP, its scheduler and the queue.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pipeline.reporting.text import show

Metric = dict[str, Any]
Metrics = dict[str, Metric]

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
ABILITIES = {  # that a probe looks for
    "stream_usage": "token counts in a stream", "one_token_an_event": "one token an event",
    "ignore_eos": "replies of forced length", "seed": "a seed that is honoured",
    "prompt_logprobs": "log-probabilities of a prompt by echo",
    "kld": "KLD over the whole vocabulary", "ppl": "perplexity",
    "delta_p": "change of the true token's probability",
}  # fmt: skip
COLUMNS = {
    "bits/weight": "bits_per_weight", "TTFT (ms)": "ttft_ms", "TTFT p99 (ms)": "ttft_p99_ms", "TPOT (ms)": "tpot_ms",
    "decode tok/s": "decode_tok_s", "throughput tok/s": "throughput_tok_s", "memory (MB)": "memory_bytes",
    "KLD (nats)": "kld_mean", "failed (%)": "failure_rate",
}  # fmt: skip
LEVEL = {
    "TTFT p50 (ms)": "ttft_p50_ms", "TTFT p95 (ms)": "ttft_p95_ms", "TTFT p99 (ms)": "ttft_p99_ms",
    "TPOT p50 (ms)": "tpot_p50_ms", "TPOT p99 (ms)": "tpot_p99_ms", "E2E p50 (ms)": "e2e_p50_ms", "E2E p99 (ms)": "e2e_p99_ms",
    "req/s": "throughput_req_s", "tok/s": "throughput_tok_s", "goodput (req/s)": "goodput_req_s",
    "within objective (%)": "attainment", "failed (%)": "failure_rate",
}  # fmt: skip
DETAILS = {  # speed in process, all of it
    "load (s)": "load_s", "TTFT of the first request after loading (ms)": "ttft_cold_ms", "TTFT (ms)": "ttft_ms",
    "TTFT, prefix not seen before (ms)": "ttft_ms/prefix-cold", "TTFT, prefix kept (ms)": "ttft_ms/prefix-warm",
    "TPOT (ms)": "tpot_ms", "gap between tokens p50 (ms)": "itl_p50_ms", "gap between tokens p95 (ms)": "itl_p95_ms",
    "gap between tokens p99 (ms)": "itl_p99_ms", "end to end (ms)": "e2e_ms", "tokenizing (ms)": "phase_ms/tokenize",
    "prefill pass (ms)": "phase_ms/prefill", "decode pass, a token (ms)": "phase_ms/decode",
    "choosing a token (ms)": "phase_ms/sampling", "detokenizing (ms)": "phase_ms/detokenize", "prefill tok/s": "prefill_tok_s",
    "MFU of prefill (%)": "mfu", "MBU of prefill (%)": "mbu/prefill", "MBU of decoding (%)": "mbu",
    "MFU of decoding (%)": "mfu/decode", "keys and values, a token (MB)": "kv_bytes_per_token",
    "memory while loading (MB)": "load_memory_bytes", "memory of requests (MB)": "peak_memory_bytes",
    "reference's time per token, change a round (%)": "reference_drift",
}  # fmt: skip
CAPTION = (
    "Context: prompt tokens; in the benchmark's sweeps over it, prompt and reply together; where the rounds in turns with the "
    "reference have the same, the row is theirs. In process: one request after another; TTFT and TPOT are means over "
    "requests, decode tok/s counts tokens after the first, a batch's together. Server: "
    "medians over complete requests, and p99; throughput is output tokens over wall time, mean over rounds. Memory: peak of the "
    "process, or of the server's processes over all levels. Bits/weight and KLD are the variant's own, measured in process. "
    "Without brackets: too few values for an interval, or measured once. A dash: not measured there."
)


@dataclass(frozen=True)
class Point:
    """One row. context: prompt tokens; load: `1`, `4` at once, or `0.5 req/s`; metrics: by column."""

    variant: str
    source: str
    context: int
    load: str
    metrics: dict[str, Metric | None]


def view(
    results: dict[str, Any], served: dict[str, Any], faults: dict[str, str], prompts: tuple[int, int], confidence: float
) -> dict[str, Any]:
    """The points, and what the pages show of them: rows as text, caption, notes, servers."""
    rows = points(results, served, prompts)
    return {
        "points": rows, "rows": [_row(point) for point in rows], "notes": notes(rows), "unknown": unknown(results),
        "caption": f"Brackets are {100 * confidence:g} % intervals. {CAPTION}", "servers": servers(served, faults),
    }  # fmt: skip


def points(results: dict[str, Any], served: dict[str, Any], prompts: tuple[int, int]) -> list[Point]:
    """All rows, variant by variant. results: metrics/<variant>.json; served: serving/<variant>.json; prompts: prompt tokens in
    process, of one request and of a batch, where the metric's name does not contain them."""
    rows = []
    for name, result in results.items():
        rows += _in_process(name, result["metrics"], prompts)
        rows += _served(name, result["metrics"], served[name]) if name in served else []
    return rows


def _in_process(name: str, m: Metrics, prompts: tuple[int, int]) -> list[Point]:
    """One row for each context and batch."""
    rows: dict[tuple[int, int], Point] = {}
    for part, known in _parts(m).items():
        if not known:
            continue
        sizes = _sizes(part)  # a sweep over batches has prompts of its own
        context, batch = sizes["context"] or prompts[bool(sizes["batch"])], sizes["batch"] or 1
        tail = f"/{part}" if part else ""
        measured = {column: m.get(f"{of}{tail}") if of else None for column, (of, _) in FROM.items()}
        row = Point(name, IN_PROCESS, context, str(batch), {k: m.get(k) for k in OWN} | measured)
        rows.setdefault((context, batch), row)  # the rounds come first, and are surer than a sweep's few repetitions
    return list(rows.values())


def _parts(m: Metrics) -> dict[str, list[Metric]]:
    """{part: its speed figures that have a value}, in order of context and batch; "" is the requests without part."""
    parts: dict[str, list[Metric]] = {}
    for key, metric in m.items():
        stem, _, part = key.partition("/")
        if stem in SPEED and (not part or PART.fullmatch(part)):
            parts.setdefault(part, []).extend([metric] if metric["value"] is not None else [])
    return dict(sorted(parts.items(), key=lambda kv: (*_sizes(kv[0]).values(), kv[0])))


def _sizes(part: str) -> dict[str, int]:
    sizes = dict(re.findall(r"(context|batch)-(\d+)", part))
    return {kind: int(sizes.get(kind, 0)) for kind in ("context", "batch")}


def unknown(results: dict[str, Any]) -> list[str]:
    """Contexts and batches that were requested and not measured, with the reason; variants of one reason together."""
    by: dict[tuple[str, str], list[str]] = {}
    for name, result in results.items():
        for part in (p for p, known in _parts(result["metrics"]).items() if p and not known):
            reasons = [w for stem in SPEED for w in result["metrics"].get(f"{stem}/{part}", {}).get("warnings") or []]
            by.setdefault((part, reasons[0] if reasons else "no reason was kept"), []).append(name)
    return [f"{part} of {', '.join(names)}: {why}" for (part, why), names in by.items()]


def _served(name: str, m: Metrics, figures: dict[str, Any]) -> list[Point]:
    rows = []
    for level, by_name in figures["levels"].items():
        everything = by_name | {"server_memory_bytes": figures["server_memory_bytes"]}
        measured = {column: everything.get(of) if of else None for column, (_, of) in FROM.items()}
        context = figures["asked"]["load"]["prompt_tokens"]
        rows.append(Point(name, SERVER, context, load_of(level), {k: m.get(k) for k in OWN} | measured))
    return rows


def load_of(level: str) -> str:
    """`closed-4` as `4`, `open-0.5` as `0.5 req/s`."""
    kind, _, size = level.partition("-")
    return size if kind == "closed" else f"{size} req/s"


def _row(point: Point) -> dict[str, str]:
    cells = {label: show(m := point.metrics[key]) + (MARK if _warnings(m) else "") for label, key in COLUMNS.items()}
    head = {"variant": point.variant, "measured": point.source, "context": str(point.context), "at once": point.load}
    ttft, rate = point.metrics["ttft_ms"], point.metrics["throughput_tok_s"]
    requests = f"{ttft['n']} requests" if ttft else "–"
    return {**head, **cells, "n": f"{requests}, {rate['n']} rounds" if rate and point.source == SERVER else requests}


def _warnings(metric: Metric | None) -> list[str]:
    """What a reader should know of a figure that is there."""
    if not metric or metric["value"] is None:
        return []
    return [w for w in metric.get("warnings") or [] if not w.startswith(ONCE)]


def notes(rows: list[Point]) -> list[str]:
    """The warnings behind the marks, each with the figures that have it."""
    by: dict[str, list[str]] = {}
    for row in rows:
        for label, key in COLUMNS.items():
            for warning in _warnings(row.metrics[key]):
                where = f"{row.source}, context {row.context}, {row.load} at once"
                by.setdefault(warning, []).append(f"{row.variant} {label} ({where})")
    return [f"{warning}: {', '.join(dict.fromkeys(of))}" for warning, of in by.items()]


def csv_text(head: Iterable[Any], rows: Iterable[Iterable[Any]]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([head, *rows])
    return out.getvalue()


def as_csv(rows: list[Point]) -> str:
    """The table for a spreadsheet: each figure with its bounds and n; what is not known is empty."""
    columns = [*OWN[:1], *FROM, *OWN[1:]]
    head = [f"{column}{end}" for column in columns for end in ("", "_low", "_high", "_n")]
    return csv_text(["variant", "measured", "context_tokens", "at_once", *head], (
        [row.variant, row.source, row.context, row.load,
         *((row.metrics[c] or {}).get(k) for c in columns for k in ("value", "low", "high", "n"))]
        for row in rows
    ))  # fmt: skip


def details(results: dict[str, Any]) -> dict[str, list[str]]:
    """{label: a cell for each variant} of DETAILS; rows that no variant has are left out."""
    metrics = {label: [r["metrics"].get(name) for r in results.values()] for label, name in DETAILS.items()}
    return {label: [show(m) for m in row] for label, row in metrics.items() if any(m and m["value"] is not None for m in row)}


def servers(served: dict[str, Any], faults: dict[str, str]) -> list[dict[str, Any]]:
    """Each variant that was to be served: its server, its saturation point, what it lacks, its levels."""
    rows: list[dict[str, Any]] = [
        {"variant": name, "about": f"not measured: {why}", "build": None, "lacks": [], "levels": []} for name, why in faults.items()
    ]
    for name, figures in served.items():
        knee, memory = figures["knee"], figures["server_memory_bytes"]
        limits = {k: v for k, v in (figures["asked"].get("objective") or {}).items() if v is not None}
        objective = " and ".join(f"{k.removesuffix('_ms').upper()} at most {v:g} ms" for k, v in limits.items())
        about = f"{_server(figures)}; "
        if knee["value"] is None:
            about += f"no saturation point: {'; '.join(knee['warnings'])}; "
        else:
            rounds = f"single rounds: {knee['low']:g} to {knee['high']:g}; {knee['n']} rounds"
            about += f"saturation point: {knee['value']:g} requests at once ({rounds}); "
        known = memory["value"] is not None
        about += (
            f"peak memory {show(memory)} MB (n = 1, no interval)" if known else f"memory not known: {'; '.join(memory['warnings'])}"
        )
        about += f"; objective: {objective or 'none stated'}"
        rows.append({
            "variant": name, "about": about if figures["status"] == "ok" else f"{figures['status']}: {figures['reason']}; {about}",
            "build": (figures["launch"] or {}).get("build"), "lacks": lacks(figures["probe"]),
            "levels": [_level(level, by_name) for level, by_name in figures["levels"].items()],
        })  # fmt: skip
    return rows


def _server(figures: dict[str, Any]) -> str:
    launch, probe = figures["launch"], figures["probe"]
    if not launch:
        return f"{probe['model']} at {probe['url']} ({probe['api']})"
    options = "".join(f", {k} {v}" for k, v in launch.get("engine_options", {}).items())
    return f"{launch['kind']} started here ({launch['threads']} threads, {launch['parallel']} at once at most{options})"


def _level(level: str, metrics: Metrics) -> dict[str, str]:
    kind = " at once" if level.startswith("closed") else ""
    n = f"{metrics['ttft_p50_ms']['n']} requests, {metrics['throughput_req_s']['n']} rounds"
    return {"load": load_of(level) + kind, **{label: show(metrics.get(name)) for label, name in LEVEL.items()}, "n": n}


def lacks(probe: dict[str, Any]) -> list[str]:
    """What a server lacks, or may lack; findings of one reason together."""
    by: dict[tuple[bool, str], list[str]] = {}
    for key, words in ABILITIES.items():
        finding = probe.get(key) or {"value": None, "reason": "not looked for"}
        if not finding["value"]:
            by.setdefault((finding["value"] is None, finding["reason"]), []).append(words)
    form = {False: "no {}", True: "whether it has {} is not known"}
    named = {key: " or ".join(filter(None, (", ".join(words[:-1]), words[-1]))) for key, words in by.items()}
    return [f"{form[unknown].format(words)}: {why}" for (unknown, why), words in named.items()]
