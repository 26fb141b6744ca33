"""report: report.md, report.html, pictures -> reports/

`--summary` prints the table, the time of each stage and the advice; `--first` prints two rows before the rest is measured.
"""

from __future__ import annotations

import textwrap
import time
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from pipeline.core import artifacts, cli, params, records
from pipeline.core.errors import ArtifactError, ParamsError, QuantgateError
from pipeline.core.params import Params
from pipeline.core.records import BaseManifest, Results, ServerReport, VariantResult, Verdict
from pipeline.gating import freshness, verdicts
from pipeline.metrics.definitions import is_served
from pipeline.reporting import charts, effects, failures, recommendation, smallest, text, tradeoff
from pipeline.serving import results as server_results
from pipeline.speed import schedule

FIGURES = artifacts.REPORTS / "figures"
README_MARKS = ("<!-- results -->", "<!-- /results -->")
README_ENDS = "<!-- the README's part ends here -->"  # in report.md
STAGES = (
    "check", "download", "calibrate", "quantize", "reference", "floor", "diverge", "evaluate", "benchmark", "serve", "compare",
    "gate", "report", "track",
)  # fmt: skip
# Numbers that `dvc metrics show` compares between commits; everything else is in metrics/<variant>.json.
SUMMARY_METRICS = (
    "bits_per_weight", "weight_bytes", "kld_mean", "kld_floor", "kld_rounding", "kld_p999", "top1_agreement", "ppl_ratio",
    "acc/all", "acc_delta/all", "ttft_ms", "tpot_ms", "decode_tok_s", "speed_ratio", "peak_memory_bytes",
)  # fmt: skip
WIDTH = 100  # characters of a line on the terminal
UNSWEPT = "no metric was swept over contexts or batches, and no variant was served at several loads (reports/serving/)"
REPRODUCE = """git checkout <the commit that holds this page>
make repro                      # install constraints.txt into .venv, run what is out of date
quantgate gate --enforce        # the verdict, for a merge
quantgate bundle out.zip        # environment, conditions, rows and metrics, to check these results elsewhere
quantgate compare out.zip       # there: both machines side by side"""


class Picture(NamedTuple):
    """alt: its description; svg: the static picture; spec: that of the live one; why: the reason if there is none."""

    alt: str | None = None
    svg: str | None = None
    spec: records.Json | None = None
    why: str | None = None


def run_times(settings: Params) -> dict[str, list[float]]:
    """{stage: seconds of its last run on this machine, for each variant}, without stages that never ran here."""
    facts = {stage: [artifacts.run_facts(stage, name) for name in (None, *settings.variants)] for stage in STAGES}
    return {stage: [float(f["wall_s"]) for f in runs if f] for stage, runs in facts.items() if any(runs)}


def load_results(settings: Params) -> tuple[Results, Verdict]:
    """({variant: its metrics file}, the verdict on these variants)."""
    results = {name: records.read(artifacts.metrics(name), VariantResult) for name in settings.variants}
    verdict = records.read(artifacts.GATE, Verdict)
    verdict["variants"] = {n: v for n, v in verdict["variants"].items() if n in results}  # params may have lost one since
    return results, verdict


def context_of(
    results: Results, verdict: Verdict, settings: Params, table: tradeoff.View, found: smallest.Found | None
) -> dict[str, object]:
    """All that the templates show, except pictures."""
    base, reference = records.read(artifacts.BASE / artifacts.MANIFEST, BaseManifest), settings.reference
    metrics, ratio = results[reference]["metrics"], results[reference]["metrics"].get("speed_ratio")
    level, asked = f"{settings.compare.confidence * 100:g} %", settings.amount.benchmark
    rounds, tokens = text.n_of(results, "decode_tok_s"), text.n_of(results, "kld_mean")
    distance = f"KLD: distance of next-token distributions from {reference}'s, 0: the same; {tokens} tokens."
    head = f"Intervals: {level}. {distance} Speed: {rounds} rounds in turns with {reference}. Memory: peak."
    model = settings.model.model_dump()
    source = f"{model['source']} {model.get('package') or model.get('id') or model.get('path')}, licence {base['license']}"
    packed = f"dequantized from {base['dequantized_from']}" if base.get("dequantized_from") else None
    tasks = sorted({k.split("/")[1] for k in metrics if k.startswith("acc/")})
    domains = sorted({k.split("/")[1] for k in metrics if k.startswith("kld_mean/") and ":" not in k})
    hashes = {  # the verdict's inputs
        "weights of the base": base["digest"], **verdict.get("inputs", {}),
        **{f"variant {n}": r["model"] for n, r in results.items() if r["model"]},
    }  # fmt: skip
    return {
        "verdict": verdict, "rows": text.overview(results, verdict), "words": text.results_table(results, verdict),
        "reference": reference, "base": base, "seed": settings.seed,
        "machine": text.machines(results), "level": level,
        "head_caption": f"{head} Point at a value or touch it: n and method. †: see Noise and floors.", "head": head,
        "required": ", ".join(settings.gate.required), "effects": effects.rows(results, reference, settings.compare, settings.seed),
        "effects_caption": " ".join((effects.CAPTION, *(f"{note}." for note in effects.notes(results, reference)))),
        "smallest": found, "smallest_rows": smallest.rows(found) if found else [],
        "smallest_caption": smallest.caption(found) if found else "",
        "stopped_early": text.stopped_early(results),
        "calibration_gains": text.calibration_gains(results), "noise_details": text.noise_details(metrics),
        "failures": failures.of(results, reference), "visible": failures.visible, "clipped": failures.clipped,
        "fault_words": failures.FAULT_WORDS, "run_to_run": text.run_to_run(ratio["between"] if ratio else None),
        "base_words": "; ".join(filter(None, (source + text.dequantized(results[reference]) * (not packed), packed, base["note"]))),
        "versions": ", ".join(f"{name} {version}" for name, version in results[reference]["versions"].items()),
        "tradeoff": table, "cautions": text.cautions(results) + table.notes,
        "advice": recommendation.advice(results, verdict, reference, found), "noise_line": text.noise_line(metrics, reference),
        "unmeasured": text.unmeasured(results), "dominated": recommendation.domination(results, reference),
        "bounds": {n: phases for n, r in results.items() if (phases := text.bounds(r))}, "readme_ends": README_ENDS,
        "benchmark_words": f"{rounds} rounds of {asked.prompt_tokens} prompt and {asked.output_tokens} output tokens, one "
        f"request after another. Small print: {level} intervals.",
        "task_rows": [{"variant": n, **{t: text.with_flips(r, t) for t in tasks}} for n, r in results.items()],
        "domain_rows": [{"domain": d, **{n: r["metrics"].get(f"kld_mean/{d}") for n, r in results.items()}} for d in domains],
        "detail_rows": [{"metric": label, **dict(zip(results, row))} for label, row in tradeoff.details(results).items()],
        "rule_rows": [
            {"variant": n, "metric": r["metric"], "bound": r["bound"] + ("" if r["required"] else ", advisory"),
             "value": text.judged_value(r), "n": str(r["n"] or "–"), "verdict": r["verdict"], "why": r["reason"]}
            for n, v in verdict["variants"].items() for r in v["rules"]
        ],
        "hash_rows": [{"what": what, "sha256": digest} for what, digest in hashes.items()], "reproduce": REPRODUCE,
    }  # fmt: skip


def draw(
    results: Results, verdict: Verdict, settings: Params, serving: dict[str, ServerReport], found: smallest.Found | None
) -> dict[str, Picture]:
    """Draw every picture that has values. serving: {variant: its server's results}, without stale ones."""
    reference, level = settings.reference, settings.compare.confidence
    loads = charts.sweeps(results, serving, settings.amount.benchmark.prompt_tokens)
    specs = {
        "tradeoff": charts.tradeoff(results, verdict, reference, level), "domains": charts.domains(results, reference, level),
        "positions": charts.positions(results, reference, level), "latency": charts.latency(loads, level),
        "memory": charts.memory(results), "sensitivity": charts.sensitivity(found.table) if found else None,
    }  # fmt: skip
    drawn = {}
    for name, spec in specs.items():
        path, as_png = FIGURES / f"{name}.svg", FIGURES / f"{name}.png"
        if spec is None:
            for earlier in (path, as_png):  # must not stand for this run's
                earlier.unlink(missing_ok=True)
            drawn[name] = Picture(why=UNSWEPT if name == "latency" else "no variant has the values")
            continue
        svg = charts.svg(spec, name)
        artifacts.write_text(path, svg)
        drawn[name] = Picture(spec["description"], svg.replace(charts.style(), ""), spec)  # the page has the style once
        if name in ("tradeoff", "sensitivity"):  # MLflow shows no SVG
            with artifacts.atomic_file(as_png) as tmp:
                tmp.write_bytes(charts.png(spec))
    return drawn


def summary_numbers(results: Results) -> dict[str, dict[str, float]]:
    """{variant: {metric: value}} for `dvc metrics`, which drops text; without unknown values."""
    values = {name: {k: text.value_of(r, k) for k in SUMMARY_METRICS} for name, r in results.items()}
    return {name: {k: v for k, v in by_metric.items() if v is not None} for name, by_metric in values.items()}


def write(settings: Params) -> None:
    results, verdict = load_results(settings)
    serving, faults = server_results.current(results, settings)
    prompts = settings.amount.benchmark.prompt_tokens, schedule.BATCH_PROMPT
    table = tradeoff.view(results, serving, faults, prompts, settings.compare.confidence)
    found = smallest.load(results, verdict)
    drawn = draw(results, verdict, settings, serving, found)
    context = context_of(results, verdict, settings, table, found)
    context |= {"pictures": drawn, "dark": charts.dark(), "bundle": charts.library()}
    artifacts.write_text(artifacts.REPORTS / "report.md", text.render("report.md.j2", context))
    artifacts.write_text(artifacts.REPORTS / "report.html", text.render("report.html.j2", context))
    numbers = summary_numbers(results)
    artifacts.write_json(artifacts.SUMMARY, numbers)
    columns = ("decode_tok_s", "kld_mean", "weight_bytes")
    plotted = [[name, *map(row.get, columns)] for name, row in numbers.items() if row.keys() >= set(columns)]
    artifacts.write_text(artifacts.TRADEOFF, tradeoff.csv_text(["variant", *columns], plotted))
    artifacts.write_text(artifacts.TRADEOFF_TABLE, tradeoff.as_csv(table.points))


def stale_line(settings: Params) -> str | None:
    """Why the gate would refuse these results; None if it would not."""
    try:
        freshness.check(settings)
    except QuantgateError as e:
        return f"STALE: {e}"
    return None


def print_summary(settings: Params) -> None:
    """Print whether the results are stale, the table, what fails, times and advice; then verdict, next step, where to look."""
    results, verdict = load_results(settings)
    if stale := stale_line(settings):
        _say(stale)
    title = f"{settings.model.name}, tier {settings.tier}: {verdict['verdict']}"
    _table(results, verdict, f"{title} (sizes in MB; ×: decode rate, own: its engine's 16 bits)")
    for name, v in verdict["variants"].items():
        if v["verdict"] != "PASS" or text.aside(v):
            _say(f"{name}: {'; '.join(filter(None, (text.brief(v), text.aside(v))))}", "  ")
        if apart := effects.words(results, name):
            _say(apart, "  ")
    stages = run_times(settings)
    took = ", ".join(f"{stage} {sum(s):.0f} s" + (f" (×{len(s)})" if len(s) > 1 else "") for stage, s in stages.items())
    _say(f"time of each stage's last run: {took}; together {sum(map(sum, stages.values())):.0f} s")
    advised = recommendation.advice(results, verdict, settings.reference, smallest.load(results, verdict))
    _say(" ".join(filter(None, ("advice:", advised.answer, advised.serve, *advised.notes, advised.breaks, *advised.smallest))))
    if advised.setting:
        _say(f"add to variants in params.yaml: {advised.setting}", "  ")
    print(f"verdict: {verdict['verdict']}, the verdict of {', '.join(settings.gate.required)}, which alone can block a merge")
    small = f"tier {settings.tier} is too small for a verdict: set `tier: default` in params.yaml"
    print(f"next: {advised.command or (small if settings.tier == 'smoke' else 'see above what keeps variants from passing')}")
    print("report: reports/report.html     MLflow UI: make ui")


def _say(line: str, indent: str = "") -> None:
    print(textwrap.fill(line, WIDTH, initial_indent=indent, subsequent_indent=f"{indent}  ", break_on_hyphens=False))


def _table(results: Results, verdict: Verdict, title: str) -> None:
    """Print the first table in WIDTH: two digits, and the second decode rate without its interval."""
    heads = ("variant", "verdict", "MB", "KLD, nats", f"× {verdict['reference']}", "× own", "memory")
    short = []
    for row in text.overview(results, verdict):
        cells = (c.split(" ")[0] if isinstance(c, str) else text.show(c, 2, interval="own" not in k) for k, c in row.items())
        short.append(dict(zip(heads, cells)))
    cli.table(list(short[0]), short, title=title, left=("variant", "verdict"))


def print_first(settings: Params) -> None:
    """Judge and print the reference and the first variant that decides, unless all are measured. Rules on server metrics are left
    out: `serve` runs later."""
    first = settings.gate.required[0]
    if stale_line(settings) is None:
        return
    results = {name: records.read(artifacts.metrics(name), VariantResult) for name in (settings.reference, first)}
    rules = [rule for rule in settings.gate.rules if not is_served(rule.metric)]
    alone = settings.model_copy(update={"gate": settings.gate.model_copy(update={"rules": rules})})
    verdict = verdicts.of(results, alone)
    _table(results, verdict, f"first look, tier {settings.tier}")
    judged, facts = verdict["variants"][first], [artifacts.run_facts(stage, first) for stage in STAGES]
    took = sum(float(f["wall_s"]) for f in facts if f)
    _say(f"{first} took {took:.0f} s", "  ")
    _say(f"verdict: {first}: {text.verdict_word(judged)} so far: {text.brief(judged)}")
    print(f"next: {len(settings.variants) - 2} more variants follow\nreport: reports/report.html, once all are measured")


def write_readme(path: Path = Path("README.md")) -> None:
    """Copy the head of report.md between README's two marks."""
    report = artifacts.REPORTS / "report.md"
    if not report.exists():
        raise ArtifactError(f"{report} is missing; run `dvc repro`")
    _, _, body = report.read_text(encoding="utf-8").split(README_ENDS)[0].split("\n", 2)
    name = params.load().model.name
    body = f"Measured with {name} by `make repro`, written here on {time.strftime('%Y-%m-%d')}.\n{body}"
    body = body.replace("](figures/", "](reports/figures/").strip()
    artifacts.write_between(path, README_MARKS, f"\n{body}\n")


def main(
    summary: Annotated[bool, typer.Option("--summary", help="Print the table; write nothing.")] = False,
    first: Annotated[bool, typer.Option("--first", help="Print the first variant that decides, before all are measured.")] = False,
    readme: Annotated[bool, typer.Option("--readme", help="Copy the results into README.md; write nothing else.")] = False,
) -> None:
    """Write the report from metrics and verdicts."""
    options = {"--summary": summary, "--first": first, "--readme": readme}
    asked = [name for name, given in options.items() if given]
    if len(asked) > 1:
        raise ParamsError(f"{' and '.join(asked)} exclude each other; give one")
    settings = params.load()
    if readme:
        write_readme()
    if summary:
        print_summary(settings)
    if first:
        print_first(settings)
    if asked:
        return
    watch = artifacts.Stopwatch("report")
    write(settings)
    cli.say("report", f"reports/report.html, reports/report.md, {watch.done():.1f} s")


if __name__ == "__main__":
    cli.run(main)
