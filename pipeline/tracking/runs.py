"""Log results to MLflow: one run for each variant's results, one parent run for each state of the pipeline.

A state is every variant's results and verdict. Runs are keyed by content: the same state makes no run, a changed option makes one
of the variant and one of the new state. An unchanged variant keeps its run, which moves under the newest state; an older state
keeps its comparison.json.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.core import artifacts, git, records
from pipeline.core.droppings import data_files
from pipeline.core.errors import ArtifactError
from pipeline.core.explain import nominal_bits
from pipeline.core.params import Params
from pipeline.core.records import Metric, ModelManifest, ServerReport, VariantResult, VariantVerdict, Verdict
from pipeline.gating import baseline
from pipeline.reporting import effects, smallest
from pipeline.reporting.text import dequantized, in_words, markdown_table, n_of, results_table, with_unit
from pipeline.serving import results as server_results
from pipeline.tracking.connection import CURRENT, Curve, DataSet, Tracker

SWEPT = re.compile(r"(?P<stem>[^/]+)/(?P<axis>context|batch|concurrency|closed)-(?P<at>\d+)")
AXES = {"closed": "concurrency"}
Ends = Metric | records.Span | records.ShortEstimate  # value, low, high
CALIBRATED_ON = ("source", "set", "digest", "rows_asked", "rows_used", "tokens_per_row")
PARENT, JUDGED = "mlflow.parentRunId", "quantgate.judged"
WRITTEN = (str(baseline.LOCK), str(artifacts.REPORTS), "README.md")  # by the pipeline


@dataclass(frozen=True)
class State:
    """Results of each variant and each server, the verdict, and the results of `make smallest`."""

    results: dict[str, VariantResult]
    serving: dict[str, ServerReport]
    verdict: Verdict
    smallest: smallest.Found | None

    def word(self, name: str) -> str:
        return "REFERENCE" if name == self.verdict["reference"] else self.verdict["variants"][name]["verdict"]

    def variant_key(self, name: str) -> str:
        """Digest of what a variant's run is made from."""
        failures = artifacts.failures(name)
        failed = artifacts.sha256_file(failures) if failures.exists() else None
        return artifacts.digest([name, self.results[name], self.serving.get(name, {}), failed])

    def key(self) -> str:
        """Digest of what the state's run is made from: all variants and their verdicts."""
        judged = {
            name: [v["verdict"], v["required"], [[r["metric"], r["bound"], r["verdict"]] for r in v["rules"]]]
            for name, v in self.verdict["variants"].items()
        }
        found = [self.smallest.answer] if self.smallest else []
        return artifacts.digest([{n: self.variant_key(n) for n in self.results}, self.verdict["verdict"], judged, *found])


def load_state(settings: Params) -> State:
    """Read the state. Raises `ArtifactError` if results or the verdict are missing."""
    results = {name: records.read(artifacts.metrics(name), VariantResult) for name in settings.variants}
    verdict = records.read(artifacts.GATE, Verdict)
    if {verdict["reference"], *verdict["variants"]} != results.keys():
        raise ArtifactError(f"{artifacts.GATE} judges other variants than params.yaml names; run `dvc repro`")
    serving, _ = server_results.current(results, settings)
    return State(results, serving, verdict, smallest.load(results, verdict))


# ---- logging -----------------------------------------------------------------------------------------------------------------


def version_tags(state: State, name: str) -> dict[str, str]:
    """Tags of a variant's version in the registry."""
    result = state.results[name]
    return {
        "variant": name, "verdict": state.word(name), "status": result["status"], "base": result["base"],
        "model": result["model"], "key": state.variant_key(name), "location": str(artifacts.model_dir(name)),
    }  # fmt: skip


def provenance(state: State) -> dict[str, str]:
    """Tags: the machine and, if known, the commit, whether the tree differs from it, and dvc.lock's digest."""
    facts = state.results[state.verdict["reference"]]["machine"]
    machine = ", ".join(f"{k} {v}" for k, v in facts.items() if v is not None) if facts else "no timings were taken"
    tags = {"mlflow.source.name": "pipeline.track", "mlflow.source.type": "LOCAL", "machine": machine}
    if commit := git.line("rev-parse", "HEAD"):
        changed = git.line("status", "--porcelain", "--", ":/", *(f":(exclude){path}" for path in WRITTEN))
        tags |= {"mlflow.source.git.commit": commit, "git.changed": str(bool(changed)).lower()}
    if baseline.LOCK.exists():  # without this stage's own entry, which DVC writes after it
        stages = baseline.stages(baseline.LOCK.read_bytes())
        tags["dvc.lock"] = artifacts.digest({k: v for k, v in stages.items() if k != "track"})
    return tags


def log_variant(tracker: Tracker, state: State, name: str, settings: Params, made_from: dict[str, str]) -> str:
    """Log one variant unless it is logged; returns its run's id."""
    result, about = state.results[name], artifacts.model_dir(name) / artifacts.MANIFEST
    manifest = records.read(about, ModelManifest) if about.exists() else None
    files = {"metrics": artifacts.metrics(name), "manifest": about, "serving": artifacts.served(name)}
    files["broke"] = artifacts.failures(name)
    rows = (artifacts.answers, artifacts.timings, artifacts.tokens, artifacts.generations, artifacts.serving)
    files |= {f"rows/{path(name).parent.name}": path(name) for path in rows}  # all are called <variant>.jsonl

    def log(run_id: str) -> None:
        tracker.log_params(run_id, params_of(name, result, settings))
        tracker.log_dict(run_id, made_by(result, manifest, settings), "made_by.json")
        tracker.log_metrics(run_id, flat_metrics(result["metrics"]) | costs(name), curves(result, state.serving.get(name)))
        tracker.log_datasets(run_id, datasets(name, manifest))
        for folder, file in files.items():
            tracker.log_files(run_id, [file], folder)

    status = {k: str(v) for k, v in (("status", result["status"]), ("reason", result["reason"])) if v}
    run_id, is_new = tracker.run(state.variant_key(name), name, log, {"variant": name, **status, **made_from})
    tracker.created += is_new
    return run_id


def log_state(tracker: Tracker, state: State, settings: Params, made_from: dict[str, str], runs: dict[str, str]) -> str:
    """Log the whole state unless it is logged; returns its run's id. Pages are always uploaded, since wording may change alone."""
    key, word, reference = state.key(), state.verdict["verdict"], settings.reference
    tables = {"comparison.json": results_table(state.results, state.verdict)}
    if apart := effects.rows(state.results, reference, settings.compare, settings.seed):
        tables["engine_and_precision.json"] = [in_words(row) for row in apart]
    if state.smallest:
        tables["smallest.json"] = smallest.rows(state.smallest)

    def log(run_id: str) -> None:
        shared = {"model": model_name(settings), "reference": reference, "tier": settings.tier, "variants": ", ".join(runs)}
        tracker.log_params(run_id, shared | machine_class(state.results[reference]))
        whole = {"model": settings.model.model_dump(), "base": state.results[reference]["base"], "seed": settings.seed}
        tracker.log_dict(run_id, whole | measured_by(settings), "made_by.json")
        for file, table in tables.items():
            tracker.log_dict(run_id, {"columns": list(table[0]), "data": [list(row.values()) for row in table]}, file)
        if state.smallest and (best := state.smallest.best):
            values = {r["metric"]: r["value"] for r in best["judged"]["rules"]} | {"weight_bytes": best["weight_bytes"]}
            tracker.log_metrics(run_id, {f"smallest/{k}": float(v) for k, v in values.items() if v is not None})
        tracker.log_files(run_id, [Path("params.yaml"), baseline.LOCK], "made_from")

    name = f"{word} ({key[:6]}): {model_name(settings)} vs {reference}"  # verdict first: lists cut a name's end
    note = state_note(state.results, state.verdict, settings)
    shown = json.dumps([{"path": file, "type": "table"} for file in tables])  # the UI shows them as tables
    run_id, _ = tracker.run(key, name, log, {"mlflow.note.content": note, "mlflow.loggedArtifacts": shown})
    tracker.set_tags(run_id, {"verdict": word, **made_from})
    report = [artifacts.REPORTS / "report.html", artifacts.REPORTS / "report.md", artifacts.TRADEOFF_TABLE, artifacts.GATE]
    tracker.log_files(run_id, report, "report")
    tracker.log_files(run_id, data_files(artifacts.REPORTS / "figures", "*"), "figures")
    if state.smallest:
        tracker.log_files(run_id, data_files(artifacts.SMALLEST, "*"), "smallest")
    return run_id


def state_note(results: dict[str, VariantResult], verdict: Verdict, settings: Params) -> str:
    """The description of a state's run."""
    counts = (("kld_mean", "tokens"), ("acc/all", "items"), ("decode_tok_s", "rounds"))
    reference = f"`{settings.reference}`{dequantized(results[settings.reference])}"
    apart = [in_words(row) for row in effects.rows(results, settings.reference, settings.compare, settings.seed)]
    split = f"{markdown_table(apart)}\n\n{effects.CAPTION}\n\n" if apart else ""
    table = markdown_table(results_table(results, verdict))
    return (
        f"**{verdict['verdict']}** ({', '.join(settings.gate.required)}): every precision of one model against {reference}; child "
        f"runs are the variants.\n\n{table}\n\n{split}Brackets are {100 * settings.compare.confidence:.3g} % "
        f"intervals over {', '.join(f'{n_of(results, metric)} {what}' for metric, what in counts)} (tier {settings.tier}). "
        "Artifacts: report/report.html, figures/, comparison.json."
    )


def mark_current(tracker: Tracker, parent: str, runs: dict[str, str], state: State) -> None:
    """Mark this state's runs as current, its variants' runs as its children, and update their verdicts and descriptions."""
    for run in list(tracker.search(f"tags.`{CURRENT}` = 'true'")):
        if run.info.run_id not in (parent, *runs.values()):
            tracker.set_tags(run.info.run_id, {CURRENT: "false"})
    tracker.set_tags(parent, {CURRENT: "true"})
    for name, run_id in runs.items():
        tracker.set_tags(run_id, {PARENT: parent, CURRENT: "true", "verdict": state.word(name)})
        note = variant_note(state.verdict["variants"].get(name))
        digest = artifacts.digest(note)
        if tracker.client.get_run(run_id).data.tags.get(JUDGED) != digest:  # else keep what a person wrote
            tracker.set_tags(run_id, {"mlflow.note.content": note, JUDGED: digest})


# ---- what is logged ----------------------------------------------------------------------------------------------------------


def flat_metrics(metrics: dict[str, Metric]) -> dict[str, float]:
    """{name: value} with `_low` and `_high`, before the slash: kld_mean_low/news. Unknown values are left out: MLflow would show 0.
    Raises `ArtifactError` if two names collide."""
    flat: dict[str, float] = {}
    for name, metric in metrics.items():
        for full, value in _with_limits(name, metric):
            if full in flat:
                raise ArtifactError(f"two metrics would both be called {full!r} in MLflow")
            flat[full] = value
    return flat


def _with_limits(name: str, of: Ends) -> Iterator[tuple[str, float]]:
    """(name, value) of a metric and its limits, without unknown ones."""
    stem, slash, part = name.partition("/")
    for suffix, known in (("", of["value"]), ("_low", of["low"]), ("_high", of["high"])):
        if known is not None:
            yield f"{stem}{suffix}{slash}{part}", float(known)


def curves(result: VariantResult, serving: ServerReport | None = None) -> dict[str, Curve]:
    """{name: [(step, value), ...]} along an axis: kld_by_position/corpus, tpot_ms_by_context, ... Raises `ArtifactError` if a curve
    has a metric's name: MLflow would merge the two."""
    by_name: dict[str, dict[int, float]] = {}
    for name, step, ends in _points(result, serving):
        for full, value in _with_limits(name, ends):
            by_name.setdefault(full, {})[step] = value
    if both := by_name.keys() & flat_metrics(result["metrics"]).keys():
        raise ArtifactError(f"a metric and a curve would both be called {min(both)!r} in MLflow")
    return {name: sorted(points.items()) for name, points in sorted(by_name.items())}


def _points(result: VariantResult, serving: ServerReport | None) -> Iterator[tuple[str, int, Ends]]:
    for kind, spans in result["curves"].get("kld_by_position", {}).items():
        yield from ((f"kld_by_position/{kind}", span["from"], span) for span in spans)
    for point in result["curves"].get("agreement_by_position", []):
        for how, share in (("free", point["free"]), ("forced", point.get("forced"))):
            if share is not None:
                yield f"agreement_by_position/{how}", point["position"], share
    levels = serving["levels"] if serving else {}
    served = {f"{name}/{level}": metric for level, metrics in levels.items() for name, metric in metrics.items()}
    for name, m in {**served, **result["metrics"]}.items():
        if swept := SWEPT.fullmatch(name):
            axis = AXES.get(swept["axis"], swept["axis"])
            yield f"{swept['stem']}_by_{axis}", int(swept["at"]), m


def params_of(name: str, result: VariantResult, settings: Params) -> dict[str, object]:
    """Params to filter and sort runs by; `made_by` has the rest."""
    options = {f"options.{k}": _text(v) for k, v in result["asked"].items()}
    options |= {f"engine_options.{k}": _text(v) for k, v in settings.variants[name].engine_options.items()}
    return {
        "variant": name, "quantizer": result["quantizer"], "engine": result["engine"], "bits": nominal_bits(result["options"]),
        **options, "reference": result["reference"], "tier": settings.tier, **machine_class(result),
    }  # fmt: skip


def machine_class(result: VariantResult) -> dict[str, str]:
    """Processor or card, and threads: timings of one class may be compared."""
    m = result["machine"]
    return {"machine": f"{m['gpu'] or m['cpu']}, {m['threads']} threads"} if m else {}


def made_by(result: VariantResult, manifest: ModelManifest | None, settings: Params) -> dict[str, object]:
    """What else defines a variant and its measurement."""
    calibration = manifest.get("calibration") if manifest else None
    about = ("options", "dequantized_from", "kernels", "engine_options", "base", "model", "versions", "machine")
    return {
        **{k: v for k, v in result.items() if k in about and v}, "seed": settings.seed, "confidence": settings.compare.confidence,
        "calibration": {k: v for k, v in (calibration or {}).items() if k in CALIBRATED_ON},
    } | measured_by(settings)  # fmt: skip


def datasets(variant: str, manifest: ModelManifest | None) -> list[DataSet]:
    """The sets a variant was evaluated, measured or calibrated on. A task's definition and rows are one data set."""
    answers, store = artifacts.meta_of(artifacts.answers(variant)), artifacts.REFERENCE / artifacts.MANIFEST
    calibration = manifest.get("calibration") if manifest else None
    by_use = {
        "evaluation": records.read(answers, records.AnswersMeta)["sets"] if answers.exists() else {},
        "divergence": records.read(store, records.StoreManifest)["sets"] if store.exists() else {},
        "calibration": calibration.get("set_files", {}) if calibration else {},
    }
    sets: dict[tuple[str, str], dict[str, str]] = {}
    for use, files in by_use.items():
        for file, sha256 in sorted(files.items()):
            sets.setdefault((f"{Path(file).parent.name}/{Path(file).stem}", use), {})[file] = sha256
    return [(name, use, hashes) for (name, use), hashes in sets.items()]


def costs(variant: str) -> dict[str, float]:
    """Seconds of each stage's last run here (`stage_s/quantize`), and the peak memory of its largest process."""
    facts = {stage: artifacts.run_facts(stage, variant) for stage in ("quantize", "diverge", "evaluate", "benchmark", "serve")}
    seconds = {f"stage_s/{stage}": f["wall_s"] for stage, f in facts.items() if f}
    return seconds | {f"stage_peak_memory_bytes/{stage}": float(f["peak_memory_bytes"]) for stage, f in facts.items() if f}


def measured_by(settings: Params) -> dict[str, object]:
    """The params of the measurement: the tier's amounts, windows, batch sizes, lengths, resamples."""
    sections = {"amount": settings.amount, **{k: getattr(settings, k) for k in ("evaluate", "diverge", "benchmark", "compare")}}
    return {name: section.model_dump(mode="json", exclude_none=True) for name, section in sections.items()}


def _text(value: object) -> object:
    return json.dumps(value) if isinstance(value, (dict, list, bool)) or value is None else value


def model_name(settings: Params) -> str:
    """The base model's usual name."""
    model = settings.model
    name = next(str(getattr(model, key)) for key in ("file", "id", "path") if hasattr(model, key))
    return Path(name).name.removesuffix(".gguf") or "model"


# ---- what MLflow's UI shows ------------------------------------------------------------------------------------------------------

# A saved view is a tag of the experiment (`mlflow.sharedViewState.<id>`, MLflow 3.17's format); other versions ignore it.
VIEW = "tradeoff"
NAME = "quantgate: trade-off"
SIGNED = "Written by quantgate."
SECTION = "quantgate"
# MLflow always shows attributes, metrics, params and tags in that order. On a screen of 1440 points the tag `verdict` is not
# visible, so the description, which begins with it, comes first.
COLUMNS = (
    "attributes.`Description`", "tags.`verdict`", "metrics.`kld_mean`", "metrics.`top1_agreement`", "metrics.`acc_delta/all`",
    "metrics.`ttft_ms`", "metrics.`decode_tok_s`", "metrics.`weight_bytes`", "params.`quantizer`", "params.`engine`",
)  # fmt: skip
SCATTER = (("decode_tok_s", "kld_mean"), ("weight_bytes", "kld_mean"), ("ttft_ms", "decode_tok_s"))
BARS = ("kld_mean", "top1_agreement", "acc_delta/all", "decode_tok_s", "ttft_ms", "weight_bytes")
LINES = (
    "kld_by_position/corpus", "kld_by_position/trajectory", "tpot_ms_by_context", "ttft_ms_by_context",
    "throughput_tok_s_by_concurrency",
)  # fmt: skip


def _card(kind: str, key: str, **fields: object) -> dict[str, object]:
    return {"uuid": f"qg-{kind}-{key}", "type": kind, "runsCountToCompare": 20, "metricSectionId": SECTION, "deleted": False,
            "isGenerated": False, **fields}  # fmt: skip


def saved_view(made_ms: int) -> str:
    """The saved view's tag: current variants; scatter plots of quality, speed and size; bars of deciding metrics; curves."""
    charts = []
    for x, y in SCATTER:
        axes = {f"{axis}axis": {"type": "METRIC", "key": key} for axis, key in (("x", x), ("y", y))}
        charts.append(_card("SCATTER", f"{x}-{y}", displayName=f"{y} over {x}", **axes))
    charts += [_card("BAR", m, metricKey=m, displayName=m) for m in BARS]
    charts += [
        _card("LINE", m, metricKey=m, selectedMetricKeys=[m], displayName=m, xAxisKey="step", useGlobalXaxisKey=False,
              xAxisScaleType="log", scaleType="linear", range={}, yAxisKey="metric", yAxisExpressions=[], lineSmoothness=0,
              useGlobalLineSmoothing=True)
        for m in LINES
    ]  # fmt: skip
    state = {
        "searchFilter": f"tags.`{CURRENT}` = 'true' and tags.`variant` != ''",
        "orderByKey": "metrics.`kld_mean`", "orderByAsc": True, "selectedColumns": list(COLUMNS),
        "compareRunCharts": charts,
        "compareRunSections": [{"uuid": SECTION, "name": "Trade-off", "display": True, "isReordered": True, "deleted": False,
                                "isGenerated": False}],
        "isAccordionReordered": True, "hideEmptyCharts": True,
    }  # fmt: skip
    return json.dumps({"name": NAME, "createdAt": made_ms, "updatedAt": made_ms, "state": json.dumps(state)})


def describe_experiment(client: Any, experiment_id: str) -> None:
    """Set an experiment's saved view, kind and description; keep a person's own description."""
    experiment = client.get_experiment(experiment_id)
    tags = {
        f"mlflow.sharedViewState.{VIEW}": saved_view(int(experiment.creation_time or 0)),
        "mlflow.experimentKind": "custom_model_development",
        "mlflow.note.content": (
            f"{SIGNED} Quality against speed: menu `Views` (top right), `{NAME}`, then the button `Chart view` (left of the "
            f"search field); or add `?viewStateShareKey={VIEW}&compareRunsMode=CHART` to this page's address. Each parent run is "
            "one state of the pipeline, its children are the variants."
        ),
    }
    for key, value in tags.items():
        before = experiment.tags.get(key)
        is_ours = before is None or key.startswith("mlflow.sharedViewState") or before.startswith(SIGNED)
        if is_ours and before != value:
            client.set_experiment_tag(experiment_id, key, value)


def variant_note(judged: VariantVerdict | None) -> str:
    """The description of a variant's run: its verdict and a line for each rule. judged: None for the reference."""
    if judged is None:
        return "REFERENCE: every other variant is compared with it."
    lines = [f"{judged['verdict']}: {judged['reason']}"]
    for rule in judged["rules"]:
        advisory = "" if rule["required"] else ", advisory"
        value = with_unit(rule, digits=4)
        lines.append(f"- {rule['metric']} {value}, n = {rule['n']}: {rule['verdict']}{advisory}, {rule['bound']}")
    return "\n".join(lines)
