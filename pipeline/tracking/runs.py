"""Log results to MLflow: one run for each variant's results, one parent run for each state of the pipeline.

A state is every variant's results and verdict. Runs are keyed by content: the same state makes no run, a changed option makes a run
of the variant and one of the new state. An unchanged variant keeps its run, which moves under the newest state;
comparison.json of an older state keeps what it held.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.core import artifacts, git
from pipeline.core.droppings import data_files
from pipeline.core.errors import ArtifactError
from pipeline.core.params import Params
from pipeline.gating import dvc_lock
from pipeline.reporting.text import dequantized, markdown_table, n_of, show, with_unit
from pipeline.serving import results as server_results
from pipeline.tracking import views
from pipeline.tracking.connection import CURRENT, Tracker

SWEPT = re.compile(r"(?P<stem>[^/]+)/(?P<axis>context|batch|concurrency|closed)-(?P<at>\d+)")
AXES = {"closed": "concurrency"}
DIGEST = 32  # hexadecimal digits of a dataset's digest; MLflow keeps 36
DIGITS = 4  # of values in text
LIMITS = (("", "value"), ("_low", "low"), ("_high", "high"))
PARENT, JUDGED = "mlflow.parentRunId", "quantgate.judged"
WRITTEN = (str(dvc_lock.LOCK), str(artifacts.REPORTS), "README.md")  # by the pipeline
Values = dict[str, Any]  # value, low, high, ...


def verdict_of(verdict: Values, name: str, reference: str) -> str:
    """A variant's verdict as one word."""
    return "REFERENCE" if name == reference else str(verdict["variants"].get(name, {}).get("verdict", "MISSING"))


@dataclass(frozen=True)
class State:
    """Each variant's results and serving results (empty if none), and the verdict."""

    results: dict[str, Values]
    serving: dict[str, Values]
    verdict: Values

    def variant_key(self, name: str) -> str:
        """Digest of what a variant's run is made from."""
        broke = artifacts.failures(name)
        where = artifacts.sha256_file(broke) if broke.exists() else None
        return artifacts.digest([name, self.results[name], self.serving[name], where])

    def key(self) -> str:
        """Digest of what the state's run is made from: all variants, and how they were judged."""
        judged = {
            name: [v.get("verdict"), v.get("required"), [[r["metric"], r["bound"], r["verdict"]] for r in v.get("rules", [])]]
            for name, v in self.verdict["variants"].items()
        }
        return artifacts.digest([{n: self.variant_key(n) for n in self.results}, self.verdict["verdict"], judged])


def load_state(settings: Params) -> State:
    """The state on disk. Raises `ArtifactError` if results or the verdict are missing."""
    results = {name: artifacts.read_json(artifacts.metrics(name)) for name in settings.variants}
    servers, _ = server_results.current(results, settings)  # without results of other params or of variants no longer served
    return State(results, {name: servers.get(name, {}) for name in results}, artifacts.read_json(artifacts.GATE))


def compare_files(state: State, name: str) -> tuple[str, str]:
    """(how a variant's model files compare with the measured ones, what differs: empty if nothing does or they are not here)."""
    folder = artifacts.model_dir(name)
    if not (folder / artifacts.MANIFEST).exists():
        return f"{folder} is not here, and so not compared with what was measured", ""
    try:
        manifest = artifacts.read_manifest(folder)
        artifacts.verify_files(folder, manifest)
    except ArtifactError as e:
        changed = str(e).partition("; ")[0]
    else:
        changed = "" if manifest.get("digest") == state.results[name]["model"] else f"{folder} (another build than was measured)"
    return changed or "as measured", changed


def version_tags(state: State, name: str, settings: Params) -> dict[str, str]:
    """Tags of a variant's version in the registry; its files stay where they are."""
    result = state.results[name]
    return {
        "variant": name, "verdict": verdict_of(state.verdict, name, settings.reference),
        "status": result["status"], "base": result["base"], "model": str(result["model"]), "key": state.variant_key(name),
        "location": str(artifacts.model_dir(name)),
    }  # fmt: skip


def provenance(state: State, settings: Params) -> dict[str, str]:
    """Tags: the machine, and if known the commit, whether the tree differs from it, and dvc.lock's digest."""
    facts = state.results[settings.reference]["machine"] or {}
    machine = ", ".join(f"{k} {v}" for k, v in facts.items() if v is not None) or "no timings were taken"
    tags = {"mlflow.source.name": "pipeline.track", "mlflow.source.type": "LOCAL", "machine": machine}
    if commit := git.line("rev-parse", "HEAD"):
        changed = git.line("status", "--porcelain", "--", ":/", *(f":(exclude){path}" for path in WRITTEN))
        tags |= {"mlflow.source.git.commit": commit, "git.changed": str(bool(changed)).lower()}
    if dvc_lock.LOCK.exists():  # without this stage's own entry, which DVC writes after it
        stages = dvc_lock.stages(dvc_lock.LOCK.read_bytes())
        tags["dvc.lock"] = artifacts.digest({k: v for k, v in stages.items() if k != "track"})
    return tags


def log_variant(tracker: Tracker, state: State, name: str, settings: Params, made_from: dict[str, str]) -> str:
    """Log one variant unless it is there; returns its run's id."""
    result, folder = state.results[name], artifacts.model_dir(name)
    manifest = artifacts.read_manifest(folder) if (folder / artifacts.MANIFEST).exists() else {}

    def log(run_id: str) -> None:
        tracker.log_params(run_id, params_of(name, result, manifest, settings))
        tracker.log_metrics(run_id, flat_metrics(result["metrics"]), curves(result, state.serving[name]))
        tracker.log_datasets(run_id, datasets(name))
        tracker.log_files(run_id, [artifacts.metrics(name)], "metrics")
        tracker.log_files(run_id, [folder / artifacts.MANIFEST], "manifest")
        tracker.log_files(run_id, [artifacts.served(name)], "serving")
        rows = (artifacts.answers, artifacts.timings, artifacts.tokens, artifacts.generations, artifacts.serving)
        for file in (path(name) for path in rows):  # a folder for each kind: all files are called <variant>.jsonl
            tracker.log_files(run_id, [file], f"rows/{file.parent.name}")
        tracker.log_files(run_id, [artifacts.failures(name)], "broke")

    colour = views.COLOURS[list(state.results).index(name) % len(views.COLOURS)]
    tags = {"variant": name, "mlflow.runColor": colour, **made_from}
    run_id, is_new = tracker.run(state.variant_key(name), name, log, tags)
    tracker.created += is_new
    return run_id


def log_state(tracker: Tracker, state: State, settings: Params, made_from: dict[str, str], runs: dict[str, str]) -> str:
    """Log the whole state unless it is there; returns its run's id. Pages are always uploaded: wording may change alone."""
    key, verdict, reference = state.key(), state.verdict, settings.reference
    rows = comparison(state.results, verdict, reference)

    def log(run_id: str) -> None:
        shared = {f"model.{k}": v for k, v in settings.model.model_dump().items()}
        shared |= {"base": state.results[reference]["base"], "reference": reference, "seed": settings.seed, "tier": settings.tier}
        shared |= measured_by(settings)
        tracker.log_params(run_id, shared | {"variants": ", ".join(runs), "machine": made_from["machine"]})
        tracker.log_dict(run_id, {"columns": list(rows[0]), "data": [list(row.values()) for row in rows]}, "comparison.json")
        tracker.log_dict(run_id, {"runs": runs, "key": key}, "state.json")
        tracker.log_files(run_id, [Path("params.yaml"), Path("dvc.lock")], "made_from")

    name = f"{verdict['verdict']} ({key[:6]}): {model_name(settings)} vs {reference}"  # verdict first: lists cut a name's end
    tags = {
        "mlflow.note.content": state_note(state.results, verdict, settings),
        "mlflow.loggedArtifacts": '[{"path": "comparison.json", "type": "table"}]',  # the UI shows it as a table
    }
    run_id, _ = tracker.run(key, name, log, tags)
    tracker.set_tags(run_id, {"verdict": verdict["verdict"], **made_from})
    report = [artifacts.REPORTS / "report.html", artifacts.REPORTS / "report.md", artifacts.TRADEOFF_TABLE, artifacts.GATE]
    tracker.log_files(run_id, report, "report")
    tracker.log_files(run_id, data_files(artifacts.REPORTS / "figures", "*"), "figures")
    return run_id


def mark_current(tracker: Tracker, parent: str, runs: dict[str, str], state: State, settings: Params) -> None:
    """Mark the present state's runs as current, its variants' as its children, and update their verdicts."""
    for run in list(tracker.search(f"tags.`{CURRENT}` = 'true'")):
        if run.info.run_id not in (parent, *runs.values()):
            tracker.set_tags(run.info.run_id, {CURRENT: "false"})
    tracker.set_tags(parent, {CURRENT: "true"})
    for name, run_id in runs.items():
        tracker.set_tags(run_id, {PARENT: parent, CURRENT: "true", "verdict": verdict_of(state.verdict, name, settings.reference)})
        _describe(tracker, run_id, name, state, settings)


def _describe(tracker: Tracker, run_id: str, name: str, state: State, settings: Params) -> None:
    """Update a run's description and picture where its rules or verdict changed; else a person's own words stay."""
    if name == settings.reference:  # it has no rules, and a page without any picture looks broken
        tracker.log_files(run_id, [artifacts.REPORTS / "figures/tradeoff.png"], "figures")
    judged = state.verdict["variants"].get(name, {})
    digest = artifacts.digest([judged, settings.compare.confidence])
    if tracker.client.get_run(run_id).data.tags.get(JUDGED) == digest:
        return
    with tempfile.TemporaryDirectory() as work:
        picture = Path(work) / "rules.png"
        if views.draw_rules(name, judged, settings.compare.confidence, picture):
            tracker.log_files(run_id, [picture], "figures")
    tracker.set_tags(run_id, {"mlflow.note.content": variant_note(name, state.verdict, settings.reference), JUDGED: digest})


def flat_metrics(metrics: dict[str, Values]) -> dict[str, float]:
    """{name: value} with `_low` and `_high` beside. Unknown values are left out: MLflow would show them as 0. A suffix goes before
    the slash: kld_mean_low/news. Raises `ArtifactError` if two names collide."""
    flat: dict[str, float] = {}
    for name, metric in metrics.items():
        for full, value in _with_limits(name, metric):
            if full in flat:
                raise ArtifactError(f"two metrics would both be called {full!r} in MLflow")
            flat[full] = value
    return flat


def _with_limits(name: str, metric: Values) -> Iterator[tuple[str, float]]:
    """(name, value) of a metric and of its interval's limits, without unknown ones."""
    stem, slash, part = name.partition("/")
    for suffix, key in LIMITS:
        if metric.get(key) is not None:
            yield f"{stem}{suffix}{slash}{part}", float(metric[key])


def curves(result: Values, serving: Values | None = None) -> dict[str, list[tuple[int, float]]]:
    """{name: [(step, value), ...]} of what is measured along an axis: kld_by_position/corpus, tpot_ms_by_context, ... Raises
    `ArtifactError` if a curve has a metric's name: MLflow would merge the two."""
    by_name: dict[str, dict[int, float]] = {}
    for name, step, metric in _points(result, serving or {}):
        for full, value in _with_limits(name, metric):
            by_name.setdefault(full, {})[step] = value
    if both := by_name.keys() & flat_metrics(result["metrics"]).keys():
        raise ArtifactError(f"a metric and a curve would both be called {min(both)!r} in MLflow")
    return {name: sorted(points.items()) for name, points in sorted(by_name.items())}


def _points(result: Values, serving: Values) -> Iterator[tuple[str, int, Values]]:
    drawn = result.get("curves") or {}
    for kind, points in (drawn.get("kld_by_position") or {}).items():
        yield from ((f"kld_by_position/{kind}", p["from"], p) for p in points)
    for point in drawn.get("agreement_by_position") or []:
        yield from ((f"agreement_by_position/{k}", point["position"], point[k]) for k in ("free", "forced") if k in point)
    levels = {f"{name}/{level}": m for level, metrics in (serving.get("levels") or {}).items() for name, m in metrics.items()}
    for name, metric in {**levels, **result["metrics"]}.items():
        swept = SWEPT.fullmatch(name)
        if swept and isinstance(metric, dict):
            yield f"{swept['stem']}_by_{AXES.get(swept['axis'], swept['axis'])}", int(swept["at"]), metric


def params_of(name: str, result: Values, manifest: Values, settings: Params) -> dict[str, Any]:
    """Everything that defines a variant and its measurement."""
    calibration = manifest.get("calibration") or {}
    kept = {k: calibration.get(k) for k in ("source", "set", "digest", "rows_asked", "rows_used", "tokens_per_row")}
    values = {
        "variant": name, "quantizer": result["quantizer"], "engine": result["engine"], "status": result["status"],
        **{f"options.{k}": v for k, v in result["options"].items()},
        **{f"engine_options.{k}": v for k, v in (result.get("engine_options") or {}).items()},
        **{f"calibration.{k}": v for k, v in kept.items() if v is not None},
        **{k: result[k] for k in ("reason", "reference", "base", "dequantized_from", "kernels") if result.get(k)},
        "model": result["model"], "seed": settings.seed, "tier": settings.tier, "confidence": settings.compare.confidence,
        "versions": result["versions"], "machine": result["machine"], **measured_by(settings),
    }  # fmt: skip
    return {k: _text(v) for k, v in values.items()}


def measured_by(settings: Params) -> dict[str, Any]:
    """What defines the measurement: the tier's amounts, windows, batch sizes, lengths, resamples."""
    sections = {"amount": settings.amount, **{k: getattr(settings, k) for k in ("evaluate", "diverge", "benchmark", "compare")}}
    dumped = {f"{name}.{k}": v for name, section in sections.items() for k, v in section.model_dump(exclude_none=True).items()}
    return {k: _text(v) for k, v in dumped.items()}


def _text(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, (dict, list, bool)) or value is None else value


def model_name(settings: Params) -> str:
    """The base model's usual name."""
    model = settings.model
    names = [str(getattr(model, key)) for key in ("file", "id", "path") if hasattr(model, key)]
    return Path(names[0]).name.removesuffix(".gguf") or "model"


def datasets(variant: str) -> list[dict[str, str]]:
    """{name, digest, source, context, profile} of each set that a variant was evaluated, measured or calibrated on."""
    answers = _read(artifacts.meta_of(artifacts.answers(variant))).get("sets")
    reference = _read(artifacts.REFERENCE / artifacts.MANIFEST).get("sets")
    calibration = _read(artifacts.model_dir(variant) / artifacts.MANIFEST).get("calibration") or {}
    by_use = {"evaluation": answers, "divergence": reference, "calibration": calibration.get("set_files")}
    return [dataset for context, files in by_use.items() for dataset in _sets(files, context)]


def _read(path: Path) -> Values:
    return dict(artifacts.read_json(path)) if path.exists() else {}


def _sets(files: dict[str, str] | None, context: str) -> Iterator[dict[str, str]]:
    """One dataset for each name: a task's definition and rows belong together."""
    by_name: dict[str, dict[str, str]] = {}
    for file, sha256 in (files or {}).items():
        by_name.setdefault(f"{Path(file).parent.name}/{Path(file).stem}", {})[file] = sha256
    for name, hashes in sorted(by_name.items()):
        yield {
            "name": name, "digest": artifacts.digest(hashes)[:DIGEST], "source": json.dumps(sorted(hashes)),
            "context": context, "profile": json.dumps({"sha256": hashes}),
        }  # fmt: skip


COLUMNS = {
    "size MB": "weight_bytes", "KLD (nats)": "kld_mean", "top-1 (%)": "top1_agreement", "accuracy Δ (pp)": "acc_delta/all",
    "TTFT (ms)": "ttft_ms", "decode tok/s": "decode_tok_s",
}  # fmt: skip


def comparison(results: dict[str, Values], verdict: Values, reference: str) -> list[dict[str, str]]:
    """The trade-off: a row for each variant, values as text with their intervals."""
    return [
        {"variant": name, "verdict": verdict_of(verdict, name, reference)}
        | {head: show(r["metrics"].get(metric), DIGITS) for head, metric in COLUMNS.items()}
        for name, r in results.items()
    ]


def state_note(results: dict[str, Values], verdict: Values, settings: Params) -> str:
    """The description of a state's run."""
    table = markdown_table(comparison(results, verdict, settings.reference))
    counts = [f"{n_of(results, m)} {what}" for m, what in (
        ("kld_mean", "tokens"), ("acc/all", "items"), ("decode_tok_s", "rounds"))]  # fmt: skip
    reference = f"`{settings.reference}`{dequantized(results[settings.reference])}"
    return (
        f"**{verdict['verdict']}**: every precision of one model against {reference}; child runs are the variants.\n\n"
        f"{table}\n\nBrackets are {100 * settings.compare.confidence:.3g} % intervals over {', '.join(counts)} (tier "
        f"{settings.tier}). Artifacts: report/report.html, figures/, comparison.json."
    )


def variant_note(name: str, verdict: Values, reference: str) -> str:
    """The description of a variant's run: its verdict, then a line for each rule."""
    if name == reference:
        return "REFERENCE: every other variant is compared with it."
    judged = verdict["variants"].get(name, {})
    lines = [f"{judged.get('verdict', 'MISSING')}: {judged.get('reason', 'no verdict')}"]
    for rule in judged.get("rules", []):
        advisory = "" if rule["required"] else ", advisory"
        value = with_unit(rule, digits=DIGITS)
        lines.append(f"- {rule['metric']} {value}, n = {rule['n']}: {rule['verdict']}{advisory}, {rule['bound']}")
    return "\n".join(lines)
