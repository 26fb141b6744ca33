"""report: report.md, report.html, figures -> reports/

`--summary` prints the table, what each stage took, and where to look.
"""

from __future__ import annotations

import csv
import io
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from pipeline import artifacts, cli, noise, params, pictures, served, sweep, tradeoff, where
from pipeline.params import Params

CALIBRATED = ("gptq", "awq")
FIGURES = artifacts.REPORTS / "figures"
README_MARKS = ("<!-- results -->", "<!-- /results -->")
TEMPLATES = Path(__file__).parent / "templates"
STAGES = (
    "check",
    "download",
    "calibrate",
    "quantize",
    "reference",
    "floor",
    "diverge",
    "evaluate",
    "benchmark",
    "generate",
    "serve",
    "compare",
    "locate",
    "gate",
    "report",
    "track",
)
# Numbers that `dvc metrics show` compares between commits; everything else is in metrics/<variant>.json.
SUMMARY_METRICS = (
    "bits_per_weight", "weight_bytes", "kld_mean", "kld_floor", "kld_rounding", "kld_p999", "top1_agreement", "ppl_ratio",
    "acc/all", "acc_delta/all", "ttft_ms", "tpot_ms", "decode_tok_s", "speed_ratio", "peak_memory_bytes",
)  # fmt: skip


# --- figures in words --------------------------------------------------------------------------------------------


def show(metric: dict[str, Any] | None, digits: int = 3, scale: float = 1.0, sign: bool = False) -> str:
    """`0.00623 [0.00579, 0.00675]`, or a dash where there is no value."""
    if not metric or metric["value"] is None:
        return "–"
    style = f"{'+' if sign else ''}.{digits}g"
    text = _number(metric["value"] * scale, style)
    if metric["low"] is None or metric["low"] == metric["high"]:
        return text
    return f"{text} [{_number(metric['low'] * scale, style)}, {_number(metric['high'] * scale, style)}]"


def _number(value: float, style: str) -> str:
    """Like format(), without exponents in the range people read, and without a sign on zero."""
    text = format(value, style)
    if "e" in text and 1e-4 <= abs(value) < 1e6:
        text = format(round(value), "d") if abs(value) >= 1 else format(value, ".6f")
    return "0" if value == 0 else text


def table(results: dict[str, dict[str, Any]], verdict: dict[str, Any], settings: Params) -> list[dict[str, str]]:
    """One row a variant, as text; the columns are those of the README."""
    rows = []
    for name in settings.variants:
        result = results[name]
        m = result["metrics"]
        judged = verdict["variants"].get(name)
        rows.append({
            "variant": name,
            "verdict": "reference" if judged is None else judged["verdict"] + ("" if judged["required"] else " (advisory)"),
            "bits/weight": show(m.get("bits_per_weight")),
            "size MB": show(m.get("weight_bytes"), scale=1e-6),
            "KLD (nats)": show(m.get("kld_mean")) + noise.marked(m.get("kld_mean")),
            "top-1 agreement (%)": show(m.get("top1_agreement"), scale=100) + noise.marked(m.get("top1_agreement")),
            "accuracy Δ (pp)": show(m.get("acc_delta/all"), 2, sign=True),
            "TTFT (ms)": show(m.get("ttft_ms")),
            "decode tok/s": show(m.get("decode_tok_s")),
            "× reference": show(m.get("speed_ratio")),
        })  # fmt: skip
    return rows


def against_rounding(results: dict[str, dict[str, Any]]) -> list[str]:
    """What calibration buys: each calibrated variant beside plain rounding to as many bits in as large groups, in words."""
    said = []
    for name, ours in results.items():
        for other, theirs in results.items() if ours["quantizer"] in CALIBRATED else []:
            same = all(theirs["options"].get(k) == ours["options"].get(k) for k in ("bits", "group_size"))
            kld, bar = ours["metrics"].get("kld_mean"), theirs["metrics"].get("kld_mean")
            if theirs["quantizer"] == "rtn" and same and kld and bar and bar["value"]:
                less = 100 * (1 - kld["value"] / bar["value"])
                told = f"KLD {show(kld)} instead of {show(bar)} nats, {less:.0f} % less"
                said.append(f"{name} against {other}, with as many bits and groups as large: {told}")
    return said


def run_times(settings: Params) -> dict[str, list[float]]:
    """{stage: seconds of its last run on this machine, one a variant}; stages that never ran here are left out."""
    facts = {stage: [artifacts.run_facts(stage, name) for name in (None, *settings.variants)] for stage in STAGES}
    return {stage: [float(f["wall_s"]) for f in own if f] for stage, own in facts.items() if any(own)}


def load_results(settings: Params) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """({variant: its metrics}, the verdict)."""
    return {name: artifacts.read_json(artifacts.metrics(name)) for name in settings.variants}, artifacts.read_json(artifacts.GATE)


def machine_line(results: dict[str, dict[str, Any]]) -> str:
    """The machine the timings were taken on."""
    machines = list({artifacts.digest(r["machine"]): r["machine"] for r in results.values() if r["machine"]}.values())
    if not machines:
        return "no timings were taken"
    if len(machines) > 1:
        return f"{len(machines)} different machines, whose timings must not be compared: " + "; ".join(map(_machine, machines))
    return _machine(machines[0])


def _machine(machine: dict[str, Any]) -> str:
    gpu = machine["gpu"] or "no GPU"
    return (
        f"{machine['cpu']}, {machine['cores']} cores ({machine.get('cpu_capability', '?')}), {machine['threads']} threads, "
        f"{machine['memory_bytes'] / 2**30:.0f} GiB, {gpu}, {machine['system']}, Python {machine['python']}"
    )


# --- pages -------------------------------------------------------------------------------------------------------


def render(template: str, context: dict[str, Any]) -> str:
    import jinja2

    env = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=template.endswith(".html.j2"), trim_blocks=True,
        lstrip_blocks=True, undefined=jinja2.StrictUndefined, keep_trailing_newline=True,
    )  # fmt: skip
    return env.get_template(template).render(context)


def context_of(results: dict[str, dict[str, Any]], verdict: dict[str, Any], settings: Params) -> dict[str, Any]:
    base = artifacts.read_manifest(artifacts.BASE)
    first = results[settings.reference]["metrics"]
    return {
        "verdict": verdict, "rows": table(results, verdict, settings), "reference": settings.reference, "show": show,
        "results": results, "base": base, "model": settings.model.model_dump(), "seed": settings.seed,
        "machine": machine_line(results), "confidence": settings.compare.confidence,
        "tokens": first.get("kld_mean", {}).get("n", 0), "items": first.get("acc/all", {}).get("n", 0),
        "against_rounding": against_rounding(results), "noise": noise.sentence(first, settings.reference),
        "where": where.where(results, settings.reference), "visible": where.visible, "clipped": where.clipped,
        "fault_words": where.FAULT_WORDS,
        "rounds": first.get("decode_tok_s", {}).get("n", 0), "benchmark": settings.amount.benchmark,
        "versions": results[settings.reference]["versions"],
        "tradeoff": tradeoff_of(results, settings),
        "tasks": sorted({k.split("/")[1] for k in first if k.startswith("acc/")}),
        "domains": sorted({k.split("/")[1] for k in first if k.startswith("kld_mean/") and ":" not in k}),
    }  # fmt: skip


def tradeoff_of(results: dict[str, dict[str, Any]], settings: Params) -> dict[str, Any]:
    figures, faults = served.current(results, settings)
    prompts = settings.amount.benchmark.prompt_tokens, sweep.BATCH_PROMPT
    return tradeoff.view(results, figures, faults, prompts, settings.compare.confidence, show)


def summary_numbers(results: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """{variant: {metric: value}} for `dvc metrics`, which drops text; unknown values are left out."""
    found = {}
    for name, result in results.items():
        values = {k: result["metrics"][k]["value"] for k in SUMMARY_METRICS if k in result["metrics"]}
        found[name] = {k: v for k, v in values.items() if v is not None}
    return found


def tradeoff_csv(numbers: dict[str, dict[str, float]]) -> str:
    """The trade-off as a table for `dvc plots`."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["variant", "decode_tok_s", "kld_mean", "weight_bytes"])
    for name, values in numbers.items():
        if {"decode_tok_s", "kld_mean", "weight_bytes"} <= values.keys():
            writer.writerow([name, values["decode_tok_s"], values["kld_mean"], values["weight_bytes"]])
    return out.getvalue()


def write(settings: Params) -> None:
    results, verdict = load_results(settings)
    pictures.draw_tradeoff(results, verdict, settings.reference, FIGURES / "tradeoff.svg")
    context = context_of(results, verdict, settings)
    picture = (FIGURES / "tradeoff.svg").read_text(encoding="utf-8")
    context["picture"] = picture[picture.index("<svg") :]
    artifacts.write_text(artifacts.REPORTS / "report.md", render("report.md.j2", context))
    artifacts.write_text(artifacts.REPORTS / "report.html", render("report.html.j2", context))
    numbers = summary_numbers(results)
    artifacts.write_json(artifacts.SUMMARY, numbers)
    artifacts.write_text(artifacts.TRADEOFF, tradeoff_csv(numbers))
    artifacts.write_text(artifacts.TRADEOFF_TABLE, tradeoff.as_csv(context["tradeoff"]["points"]))


def print_summary(settings: Params) -> None:
    """The table, the stages' times, and where to look next."""
    results, verdict = load_results(settings)
    rows = table(results, verdict, settings)
    title = f"{settings.model.source} model, reference {settings.reference}, tier {settings.tier}: {verdict['verdict']}"
    cli.table(list(rows[0]), rows, title=title, left=("variant", "verdict"))
    for name, v in verdict["variants"].items():
        print(f"  {name}: {v['verdict']}: {v['reason']}")
    stages = run_times(settings)
    told = ", ".join(f"{stage} {sum(s):.0f} s" + (f" (×{len(s)})" if len(s) > 1 else "") for stage, s in stages.items())
    total = sum(map(sum, stages.values()))
    print(f"time: {told}; {total:.0f} s in all, when each last ran")
    print("report: reports/report.html     MLflow UI: make ui")


def write_readme(path: Path = Path("README.md")) -> None:
    """Put report.md's body between README's two marks, so that its numbers are those of reports/."""
    body = (artifacts.REPORTS / "report.md").read_text(encoding="utf-8").split("\n", 2)[2]
    body = f"Measured by `make repro`, written here on {time.strftime('%Y-%m-%d')}:\n\n{body}"
    body = body.replace("](figures/", "](reports/figures/").strip()
    artifacts.write_between(path, README_MARKS, f"\n{body}\n")


def main(
    summary: Annotated[bool, typer.Option("--summary", help="Print the table; write nothing.")] = False,
    readme: Annotated[bool, typer.Option("--readme", help="Copy the results into README.md; write nothing else.")] = False,
) -> None:
    """Write the report from metrics and verdicts."""
    settings = params.load()
    if summary or readme:
        if readme:
            write_readme()
        else:
            print_summary(settings)
        return
    watch = artifacts.Stopwatch("report")
    write(settings)
    cli.say("report", f"reports/report.html, reports/report.md, {watch.done():.1f} s")


if __name__ == "__main__":
    cli.run(main)
