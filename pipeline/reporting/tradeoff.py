"""The trade-off as one table: precision x context x requests at once x speed x memory.

Measurements in process and behind a server have separate rows: in process one engine answers and nothing waits; a server's times
include HTTP, its scheduler and the queue.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from pipeline.core.records import Finding, Launch, Metric, Metrics, Probe, Results, ServerReport
from pipeline.metrics.serving import PREFIX, TAIL
from pipeline.reporting.text import Row, grouped, reason_of, show, together, with_unit, worth

IN_PROCESS, SERVER = "in process", "server"
OWN = ("bits_per_weight", "kld_mean")  # the same in process and behind a server
# column of the table -> metric in process (its part follows), metric of a server's level
FROM: dict[str, tuple[str | None, str | None]] = {
    "ttft_ms": ("ttft_ms", "ttft_p50_ms"), "ttft_p99_ms": (None, "ttft_p99_ms"), "tpot_ms": ("tpot_ms", "tpot_p50_ms"),
    "decode_tok_s": ("decode_tok_s", None), "throughput_tok_s": ("throughput_tok_s", "throughput_tok_s"),
    "memory_bytes": ("peak_memory_bytes", None),  # a server's is one value for all levels
    "failure_rate": ("failure_rate", "failure_rate"), "attainment": (None, "attainment"),
}  # fmt: skip
SPEED = ("ttft_ms", "tpot_ms", "decode_tok_s", "peak_memory_bytes")  # a part of any of these is a row
PART = re.compile(r"(context|batch)-\d+")
COLUMNS = {  # in process; the CSV has all
    "TTFT, ms": "ttft_ms", "TPOT, ms": "tpot_ms", "decode tok/s": "decode_tok_s", "memory, MB": "memory_bytes",
    "failed, %": "failure_rate",
}  # fmt: skip
LEVEL = {
    "TTFT p50, ms": "ttft_p50_ms", "TTFT p95, ms": "ttft_p95_ms", "TTFT p99, ms": "ttft_p99_ms",
    "TPOT p50, ms": "tpot_p50_ms", "TPOT p99, ms": "tpot_p99_ms", "E2E p50, ms": "e2e_p50_ms", "E2E p99, ms": "e2e_p99_ms",
    "req/s": "throughput_req_s", "tok/s": "throughput_tok_s", "goodput, req/s": "goodput_req_s",
    "within objective, %": "attainment", "failed, %": "failure_rate",
}  # fmt: skip
REUSE = {"prefix reused, %": "prefix_hit_rate", "TTFT gain": "prefix_gain", "same reply, %": "prefix_same"}
DETAILS = {  # all of speed in process
    "load, s": "load_s", "TTFT of the first request after loading, ms": "ttft_cold_ms", "TTFT, ms": "ttft_ms",
    "TTFT, prefix not seen before, ms": "ttft_ms/prefix-cold", "TTFT, prefix kept, ms": "ttft_ms/prefix-warm",
    "TPOT, ms": "tpot_ms", "gap between tokens p50, ms": "itl_p50_ms", "gap between tokens p95, ms": "itl_p95_ms",
    "gap between tokens p99, ms": "itl_p99_ms", "end to end, ms": "e2e_ms", "tokenizing, ms": "phase_ms/tokenize",
    "prefill pass, ms": "phase_ms/prefill", "decode pass, a token, ms": "phase_ms/decode",
    "choosing a token, ms": "phase_ms/sampling", "detokenizing, ms": "phase_ms/detokenize", "prefill tok/s": "prefill_tok_s",
    "MFU of prefill, %": "mfu", "MBU of prefill, %": "mbu/prefill", "MBU of decoding, %": "mbu",
    "MFU of decoding, %": "mfu/decode", "keys and values, a token, MB": "kv_bytes_per_token",
    "memory while loading, MB": "load_memory_bytes", "memory of requests, MB": "peak_memory_bytes",
    "reference's time per token, change a round, %": "reference_drift",
    "speed-up by its draft": "spec_speed_ratio", "speed-up of whole requests by its draft": "spec_e2e_ratio",
    "tokens a pass with its draft": "spec_step", "draft's tokens accepted, %": "spec_accepted",
    "same reply without its draft, %": "spec_same",
    "tokens a pass as the reference's draft of 4, expected": "draft_step/4",
    "the same at temperature 1": "draft_step_sampled/4",
}  # fmt: skip
CAPTION = (
    "Context: prompt tokens; in sweeps over it, prompt and reply together. One request after another: TTFT and TPOT are means, "
    "decode tok/s counts tokens after the first, a batch's together. Memory: peak of the process, measured once."
)
SERVED_AS = {
    "served_kld_lower_bound": "KLD to the reference at least {} (a lower bound)",
    "served_top1_agreement": "top-1 agreement {}",
}


@dataclass(frozen=True)
class Point:
    """One row. context: prompt tokens; load: `1`, `4` at once, or `0.5 req/s`; metrics: by column."""

    variant: str
    source: str
    context: int
    load: str
    metrics: dict[str, Metric | None]


@dataclass(frozen=True)
class Server:
    """A variant to be served: its server in words, what it lacks, a row for each level."""

    variant: str
    about: str
    build: str | None = None
    lacks: list[str] = field(default_factory=list)
    levels: list[Row] = field(default_factory=list)


@dataclass(frozen=True)
class View:
    """The points; for the pages: rows of those in process, notes, what was not measured and why, servers."""

    points: list[Point]
    rows: list[Row]
    notes: list[str]
    unknown: list[str]
    caption: str
    servers: list[Server]


def view(
    results: Results, serving: dict[str, ServerReport], faults: dict[str, str], prompts: tuple[int, int], confidence: float
) -> View:
    """serving: {variant: its server's results}; faults: {variant: why it has none}; prompts: see `points`."""
    every = points(results, serving, prompts)
    rows = [_row(point) for point in every if point.source == IN_PROCESS]
    caption = f"Small print: {100 * confidence:g} % intervals. {CAPTION}"
    servers = [Server(name, f"not measured: {why}") for name, why in faults.items()]
    servers += [_server(name, report) for name, report in serving.items()]
    return View(every, rows, notes(every, serving), unknown(results), caption, servers)


def points(results: Results, serving: dict[str, ServerReport], prompts: tuple[int, int]) -> list[Point]:
    """All points, variant by variant. prompts: prompt tokens of one request and of a batch in process, used where a metric's name
    does not say."""
    rows = []
    for name, result in results.items():
        rows += _in_process(name, result["metrics"], prompts)
        rows += _behind_server(name, result["metrics"], serving[name]) if name in serving else []
    return rows


def _in_process(name: str, metrics: Metrics, prompts: tuple[int, int]) -> list[Point]:
    rows: dict[tuple[int, str], Point] = {}
    for part, speeds in _parts(metrics).items():
        if all(m["value"] is None for m in speeds):
            continue
        kind, size = _size(part)
        context = size if kind == "context" else prompts[kind == "batch"]
        load = str(size) if kind == "batch" else "1"
        measured = {column: metrics.get(f"{stem}/{part}" if part else stem) if stem else None for column, (stem, _) in FROM.items()}
        row = Point(name, IN_PROCESS, context, load, {k: metrics.get(k) for k in OWN} | measured)
        rows.setdefault((context, load), row)  # the rounds come first: a sweep has fewer repetitions
    return list(rows.values())


def _parts(metrics: Metrics) -> dict[str, list[Metric]]:
    """{part: its speed metrics}: first "" (the rounds), then the sweeps' `batch-4`, `context-1024`."""
    split = ((*name.partition("/"), metric) for name, metric in metrics.items())
    parts = together((part, metric) for stem, _, part, metric in split if stem in SPEED and (not part or PART.fullmatch(part)))
    return dict(sorted(parts.items(), key=lambda item: _size(item[0])))


def _size(part: str) -> tuple[str, int]:
    kind, _, size = part.partition("-")
    return kind, int(size or 1)


def unknown(results: Results) -> list[str]:
    """Contexts and batches that were requested and not measured, with the reason and its variants."""
    parts = ((name, part, speeds) for name, r in results.items() for part, speeds in _parts(r["metrics"]).items() if part)
    missing = ((name, part, speeds) for name, part, speeds in parts if all(m["value"] is None for m in speeds))
    why = (((part, next((w for m in speeds for w in m["warnings"]), "no reason given")), name) for name, part, speeds in missing)
    return [f"{part} of {', '.join(names)}: {reason}" for (part, reason), names in together(why).items()]


def _behind_server(name: str, metrics: Metrics, report: ServerReport) -> list[Point]:
    rows = []
    for level, by_name in report["levels"].items():
        measured = {column: by_name.get(stem) if stem else None for column, (_, stem) in FROM.items()}
        measured["memory_bytes"] = report["server_memory_bytes"]
        asked = report["asked"]
        context = asked["prefix"]["shared_tokens"] + TAIL if level in PREFIX else asked["load"]["prompt_tokens"]
        rows.append(Point(name, SERVER, context, load_of(level), {k: metrics.get(k) for k in OWN} | measured))
    return rows


def load_of(level: str) -> str:
    """`closed-4` as `4`, `open-0.5` as `0.5 req/s`, `prefix-warm` as `1, prefix warm`."""
    kind, _, size = level.partition("-")
    if kind == "prefix":
        return f"1, prefix {size}"
    return size if kind == "closed" else f"{size} req/s"


def _row(point: Point) -> Row:
    return {"variant": point.variant, "context": str(point.context), "at once": point.load,
            **{label: point.metrics[key] for label, key in COLUMNS.items()}}  # fmt: skip


def notes(rows: list[Point], serving: dict[str, ServerReport]) -> list[str]:
    """Warnings, each once with the values it concerns."""
    values = [(f"{row.variant}/{key}", row.metrics[key]) for row in rows if row.source == IN_PROCESS for key in COLUMNS.values()]
    for name, report in serving.items():
        values += [(f"{name} (server)/{key}", by_name.get(key)) for by_name in report["levels"].values() for key in LEVEL.values()]
    return grouped((warning, where) for where, metric in values for warning in worth(metric))


def csv_text(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([head, *rows])
    return out.getvalue()


def as_csv(rows: list[Point]) -> str:
    """The table for a spreadsheet: each value with its bounds and n; an unknown cell is empty."""
    columns = [*OWN[:1], *FROM, *OWN[1:]]
    head = [f"{column}{end}" for column in columns for end in ("", "_low", "_high", "_n")]
    table = []
    for row in rows:
        cells = [cell for column in columns for cell in _cells(row.metrics[column])]
        table.append([row.variant, row.source, row.context, row.load, *cells])
    return csv_text(["variant", "measured", "context_tokens", "at_once", *head], table)


def _cells(metric: Metric | None) -> list[object]:
    return [metric["value"], metric["low"], metric["high"], metric["n"]] if metric else [None] * 4


def details(results: Results) -> dict[str, list[Metric | None]]:
    """{label: a cell for each variant} of DETAILS, without rows that are empty."""
    metrics = {label: [r["metrics"].get(name) for r in results.values()] for label, name in DETAILS.items()}
    return {label: row for label, row in metrics.items() if any(m and m["value"] is not None for m in row)}


def _server(name: str, report: ServerReport) -> Server:
    knee, memory, probe, launch = report["knee"], report["server_memory_bytes"], report.get("probe"), report.get("launch")
    assert knee and memory and probe  # of every server that ran
    if knee["value"] is None:
        saturation = f"no saturation point: {reason_of(knee)}"
    else:
        rounds = f"single rounds: {knee['low']:g} to {knee['high']:g}; {knee['n']} rounds"
        saturation = f"saturation point: {knee['value']:g} requests at once ({rounds})"
    if memory["value"] is None:
        peak = f"memory not known: {reason_of(memory)}"
    else:
        peak = f"peak memory {show(memory)} MB (n = 1, no interval)"
    tokens = [f"; {words.format(with_unit(report['tokens'][name]))}" for name, words in SERVED_AS.items() if report.get("tokens")]
    limits = (report["asked"]["objective"] or {}).items()
    objective = " and ".join(f"{k.removesuffix('_ms').upper()} at most {v:g} ms" for k, v in limits if v is not None)
    reuse = REUSE if PREFIX[1] in report["levels"] else {}
    status = "" if report["status"] == "ok" else f"{report['status']}: {report['reason']}; "
    return Server(
        name, f"{status}{_where(probe, launch)}; {saturation}; {peak}{''.join(tokens)}; objective: {objective or 'none stated'}",
        launch["build"] if launch else None, lacks(probe), [_level(*level, reuse) for level in report["levels"].items()],
    )  # fmt: skip


def _where(probe: Probe, launch: Launch | None) -> str:
    if not launch:
        return f"{probe['model']} at {probe['url']} ({probe['api']})"
    options = "".join(f", {k} {v}" for k, v in launch["engine_options"].items())
    return f"{launch['kind']} started here ({launch['threads']} threads, {launch['parallel']} at once at most{options})"


def _level(level: str, metrics: Metrics, more: dict[str, str]) -> Row:
    kind = " at once" if level.startswith("closed") else ""
    return {"load": load_of(level) + kind, **{label: metrics.get(name) for label, name in (LEVEL | more).items()}}


def lacks(probe: Probe) -> list[str]:
    """What a server lacks, or may lack, grouped by reason."""
    findings: list[tuple[Finding, str]] = [
        (probe["stream_usage"], "token counts in a stream"), (probe["one_token_an_event"], "one token an event"),
        (probe["ignore_eos"], "replies of forced length"),
        *([(probe["prompt_logprobs"], "log-probabilities of given tokens")] if "prompt_logprobs" in probe else ()),
    ]  # fmt: skip
    by = together(((finding["value"] is None, finding["reason"]), words) for finding, words in findings if not finding["value"])
    form = {False: "no {}", True: "whether it has {} is not known"}
    named = {key: " or ".join(filter(None, (", ".join(words[:-1]), words[-1]))) for key, words in by.items()}
    return [f"{form[unsure].format(words)}: {why}" for (unsure, why), words in named.items()]
