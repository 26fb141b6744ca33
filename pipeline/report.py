"""report: report.md, report.html, pictures -> reports/

`--summary` prints the table, what each stage took, and where to look, `--first` two rows of it before the rest is measured.
"""

from __future__ import annotations

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
from pipeline.reporting import charts, failures, plots, recommendation, text, tradeoff
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
UNSWEPT = "no metric was swept over contexts or batches, and no variant was served at several loads (reports/serving/)"


class Picture(NamedTuple):
    """alt: in words; svg: the picture itself; both None where there is none, and `why` says why."""

    alt: str | None
    svg: str | None
    why: str | None


def run_times(settings: Params) -> dict[str, list[float]]:
    """{stage: seconds of its last run on this machine, one a variant}; stages that never ran here are left out."""
    facts = {stage: [artifacts.run_facts(stage, name) for name in (None, *settings.variants)] for stage in STAGES}
    return {stage: [float(f["wall_s"]) for f in runs if f] for stage, runs in facts.items() if any(runs)}


def load_results(settings: Params) -> tuple[Results, Verdict]:
    """({variant: its metrics}, the verdict)."""
    results = {name: records.read(artifacts.metrics(name), VariantResult) for name in settings.variants}
    return results, records.read(artifacts.GATE, Verdict)


def context_of(results: Results, verdict: Verdict, settings: Params, table: tradeoff.View) -> dict[str, object]:
    """All that the templates show, but the pictures."""
    base, reference = records.read(artifacts.BASE / artifacts.MANIFEST, BaseManifest), settings.reference
    metrics, ratio = results[reference]["metrics"], results[reference]["metrics"].get("speed_ratio")
    return {
        "verdict": verdict, "rows": text.results_table(results, verdict, settings.variants), "reference": reference,
        "results": results, "base": base, "model": settings.model.model_dump(), "seed": settings.seed,
        "machine": text.machines(results), "confidence": settings.compare.confidence,
        "tokens": text.n_of(results, "kld_mean"), "items": text.n_of(results, "acc/all"),
        "calibration_gains": text.calibration_gains(results), "noise_details": text.noise_details(metrics),
        "failures": failures.of(results, reference), "visible": failures.visible, "clipped": failures.clipped,
        "fault_words": failures.FAULT_WORDS,
        "rounds": text.n_of(results, "decode_tok_s"), "benchmark": settings.amount.benchmark,
        "run_to_run": text.run_to_run(ratio.get("between") if ratio else None),
        "versions": results[reference]["versions"],
        "tradeoff": table,
        "tasks": sorted({k.split("/")[1] for k in metrics if k.startswith("acc/")}),
        "domains": sorted({k.split("/")[1] for k in metrics if k.startswith("kld_mean/") and ":" not in k}),
        "advice": recommendation.advice(results, verdict, reference), "brief": text.brief, "aside": text.aside,
        "judged_value": text.judged_value, "bars": f". {plots.level(settings.compare.confidence)}",
        "noise_line": text.noise_line(metrics, reference), "unmeasured": text.unmeasured(results),
        "dominated": recommendation.dominated(results, reference), "one_machine": recommendation.one_machine(results),
        "speed_bounds": {n: text.speed_bounds(r) for n, r in results.items() if r["bounds"]},
        "speed": tradeoff.details(results), "readme_ends": README_ENDS,
        "hashes": {  # of what the verdict rests on
            "weights of the base": base["digest"], **verdict["inputs"],
            **{f"variant {n}": r["model"] for n, r in results.items() if r["model"]},
        },
    }  # fmt: skip


def draw(results: Results, verdict: Verdict, settings: Params, serving: dict[str, ServerReport]) -> dict[str, Picture]:
    """Draw every picture for which there are values. serving: {variant: its server's results}, of those that are not stale."""
    reference, level = settings.reference, settings.compare.confidence
    loads = charts.sweeps(results, serving, settings.amount.benchmark.prompt_tokens)
    alts = {
        "tradeoff": plots.draw_tradeoff(results, verdict, reference, level, FIGURES / "tradeoff.svg"),
        "domains": charts.draw_domains(results, reference, level, FIGURES / "domains.svg"),
        "positions": charts.draw_positions(results, reference, level, FIGURES / "positions.svg"),
        "latency": charts.draw_latency(loads, level, FIGURES / "latency.svg"),
        "memory": charts.draw_memory(results, FIGURES / "memory.svg"),
    }
    drawn = {}
    for name, alt in alts.items():
        path = FIGURES / f"{name}.svg"
        if alt is None:  # an earlier run's picture must not stand for this one
            path.unlink(missing_ok=True)
            drawn[name] = Picture(None, None, UNSWEPT if name == "latency" else "no variant has the values")
        else:
            svg = path.read_text(encoding="utf-8")
            drawn[name] = Picture(alt, svg[svg.index("<svg") :], None)
    return drawn


def summary_numbers(results: Results) -> dict[str, dict[str, float]]:
    """{variant: {metric: value}} for `dvc metrics`, which drops text; unknown values are left out."""
    values = {name: {k: text.value_of(r, k) for k in SUMMARY_METRICS} for name, r in results.items()}
    return {name: {k: v for k, v in by_metric.items() if v is not None} for name, by_metric in values.items()}


def write(settings: Params) -> None:
    """Write pictures, pages and the numbers that DVC compares."""
    results, verdict = load_results(settings)
    serving, faults = server_results.current(results, settings)
    prompts = settings.amount.benchmark.prompt_tokens, schedule.BATCH_PROMPT
    table = tradeoff.view(results, serving, faults, prompts, settings.compare.confidence)
    drawn = draw(results, verdict, settings, serving)
    context = context_of(results, verdict, settings, table) | {"pictures": drawn}
    artifacts.write_text(artifacts.REPORTS / "report.md", text.render("report.md.j2", context))
    artifacts.write_text(artifacts.REPORTS / "report.html", text.render("report.html.j2", context))
    numbers = summary_numbers(results)
    artifacts.write_json(artifacts.SUMMARY, numbers)
    columns = ("decode_tok_s", "kld_mean", "weight_bytes")
    plotted = [[name, *map(row.get, columns)] for name, row in numbers.items() if row.keys() >= set(columns)]
    artifacts.write_text(artifacts.TRADEOFF, tradeoff.csv_text(["variant", *columns], plotted))
    artifacts.write_text(artifacts.TRADEOFF_TABLE, tradeoff.as_csv(table.points))


def stale_line(settings: Params) -> str | None:
    """Why the gate would not judge these results, on one line; None where it would."""
    try:
        freshness.check(settings)
    except QuantgateError as e:
        return f"STALE: {e}"
    return None


def print_summary(settings: Params) -> None:
    """Whether the results are stale, the table, the verdicts, the advice, the stages' times, and where to look next."""
    results, verdict = load_results(settings)
    if (stale := stale_line(settings)) is not None:
        print(stale)
    rows = text.results_table(results, verdict, settings.variants)
    reference = settings.reference + text.dequantized(results[settings.reference])
    title = f"{settings.model.source} model, reference {reference}, tier {settings.tier}: {verdict['verdict']}"
    cli.table(list(rows[0]), rows, title=title, left=("variant", "verdict"))
    for name, v in verdict["variants"].items():
        beside = f"; {aside}" if (aside := text.aside(v)) else ""
        print(f"  {name}: {text.verdict_word(v)}: {text.brief(v)}{beside}")
    advised = recommendation.advice(results, verdict, settings.reference)
    print("\n".join([f"advice: {advised.serve}", *(f"  next: {step}" for step in advised.ladder[-1:])]))
    stages = run_times(settings)
    took = ", ".join(f"{stage} {sum(s):.0f} s" + (f" (×{len(s)})" if len(s) > 1 else "") for stage, s in stages.items())
    total = sum(map(sum, stages.values()))
    print(f"time: {took}; {total:.0f} s in all, when each last ran")
    print("report: reports/report.html     MLflow UI: make ui")


def print_first(settings: Params) -> None:
    """The reference and the first variant that decides, judged, while others are to be measured; nothing once all are. What only a
    server tells is left out: `serve` comes later."""
    first = settings.gate.required[0]
    if stale_line(settings) is None:
        return
    results = {name: records.read(artifacts.metrics(name), VariantResult) for name in (settings.reference, first)}
    rules = [rule for rule in settings.gate.rules if not is_served(rule.metric)]
    alone = settings.model_copy(update={"gate": settings.gate.model_copy(update={"rules": rules})})
    verdict = verdicts.of(results, alone)
    rows = text.results_table(results, verdict, results)
    cli.table(list(rows[0]), rows, title=f"first look, tier {settings.tier}", left=("variant", "verdict"))
    judged, facts = verdict["variants"][first], [artifacts.run_facts(stage, first) for stage in STAGES]
    print(f"  {first}: {text.verdict_word(judged)} so far: {text.brief(judged)}")
    took = sum(float(f["wall_s"]) for f in facts if f)
    print(f"  it took {took:.0f} s beside the reference; {len(settings.variants) - 2} more variants follow")


def write_readme(path: Path = Path("README.md")) -> None:
    """Put report.md's head between README's two marks, so that its numbers are those of reports/."""
    report = artifacts.REPORTS / "report.md"
    if not report.exists():
        raise ArtifactError(f"{report} is missing; run `dvc repro`")
    title, _, body = report.read_text(encoding="utf-8").split(README_ENDS)[0].split("\n", 2)
    verdict = title.removeprefix("# quantgate: ")
    body = f"Measured by `make repro`, written here on {time.strftime('%Y-%m-%d')}; verdict of the gate: **{verdict}**\n\n{body}"
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
        raise ParamsError(f"{' and '.join(asked)} exclude each other: each does one thing and no more; give one")
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
