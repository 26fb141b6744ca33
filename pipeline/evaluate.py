"""evaluate: lm-eval tasks, one row per question -> artifacts/answers/<variant>.jsonl

Rows hold what a paired comparison needs: the item, the first tokens of its prompt, and the answer."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from pipeline import engines
from pipeline.core import artifacts, cli, isolate, params, records
from pipeline.core.errors import DataError, Unsupported
from pipeline.core.params import Evaluate, HowMany
from pipeline.core.records import AnswerRow, AnswersMeta, ItemAnswer, Json, Look, ModelManifest
from pipeline.evalset import in_parts, sets_digest
from pipeline.evalset.tasks import TASKS, is_chat, load_task, local_tasks, subset, task_files
from pipeline.gating.sequential import Looks, looks_of, reference_answers, rules_that_end, stopped
from pipeline.metrics.answers import answer_metrics, of_same_items, pair
from pipeline.metrics.builder import Builder
from pipeline.preflight.model import unanswerable

BATCH_TOKENS = 2048
LOOKED_AT = 32  # longest items in characters, among which the longest in tokens is sought
Item = tuple[str, int]  # task, index among its rows
SCORES = ("acc", "exact_match")  # lm-eval's names for "this item was answered correctly"


def evaluate(
    engine: Any, setup: Evaluate, tasks: dict[str, HowMany], seed: int, scratch: Path, looks: Looks | None = None
) -> list[AnswerRow]:
    """Score items of every task; one row per item, in task and item order. looks: when to end. scratch: an empty folder for the
    cache of `datasets`, which would otherwise return an old version of an edited set."""
    import datasets
    from lm_eval.tasks import TaskManager

    from pipeline.engines._lm_eval import lm_for

    datasets.config.HF_DATASETS_CACHE = scratch  # read when a file is loaded; the variable of that name, when it was imported
    local = local_tasks()
    loaded = {name: load_task(name) for name in tasks if name in local}
    for task, (config, _) in loaded.items():  # a JSONL file without a YAML gets one by its columns
        if not (TASKS / f"{task}.yaml").exists():
            (scratch / f"{task}.yaml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    # lm-eval's index of its own tasks costs 8 s; built only if one of them is requested
    manager = TaskManager(include_path=[TASKS, scratch], include_defaults=len(loaded) < len(tasks))
    family = clusters(tasks, seed) if looks else {}
    part = in_parts({name: task for (task, _), name in family.items()}, looks.planned, seed) if looks else {}
    rows: list[AnswerRow] = []
    for k in range(looks.planned if looks else 1):
        for task, count in tasks.items():
            config, items = loaded.get(task, ({}, []))
            lm = lm_for(engine, batch_for(items, engine.tokenizer, setup.batch_size))
            chosen = subset(len(items), count, seed) if config else None
            if looks and chosen:
                chosen = [i for i in chosen if part[family[task, i]] == k]
            if chosen == []:
                continue
            first = None if config or isinstance(count, str) else count
            result = _run(lm, manager, task, samples=chosen, limit=first, chat=is_chat(config), seed=seed)
            for name, samples in result["samples"].items():
                if config:
                    _same_rows(task, config, samples, items)
                rows += [_row(name, sample, lm, result["configs"][name]["output_type"]) for sample in samples]
        if looks:  # in the order of the reference's rows
            filters, order = list(dict.fromkeys(row["filter"] for row in rows)), list(tasks)
            rows.sort(key=lambda row: (order.index(row["task"]), filters.index(row["filter"]), row["doc_id"]))
            if looks.decided(rows):
                break
    return rows


def clusters(tasks: dict[str, HowMany], seed: int) -> dict[Item, str]:
    """{chosen item of a local task: its family, whose items depend on each other}."""
    found: dict[Item, str] = {}
    local = local_tasks()
    for task in [task for task in tasks if task in local]:
        _, items = load_task(task)
        found |= {(task, i): f"{task}/{cluster(items[i], i)}" for i in subset(len(items), tasks[task], seed)}
    return found


def cluster(item: Json, index: int) -> str:
    return str(item.get("cluster") or item.get("id") or index)


def _same_rows(task: str, config: Json, samples: list[Json], items: list[Json]) -> None:
    """Raise if `datasets` changed a row: it guesses types, and reads a column of dates as times."""
    used = {str(config.get(key)) for key in ("doc_to_text", "doc_to_choice", "doc_to_target")}
    for sample in samples:
        loaded, item = sample["doc"], items[sample["doc_id"]]
        for key in used & item.keys():
            if loaded.get(key) != item[key]:
                changed = f"{key!r} is {item[key]!r} in the file and {loaded.get(key)!r} once loaded"
                raise DataError(f"task {task!r} item {item['id']!r}: {changed} (`datasets` guesses types); write it differently")


def _run(lm: Any, manager: Any, task: str, **how: Any) -> Any:
    """lm-eval's evaluation; errors in a task's YAML or data become a `DataError`."""
    from datasets.exceptions import DatasetsError
    from jinja2 import UndefinedError

    from pipeline.engines._lm_eval import ask

    try:
        return ask(lm, manager, task, **how)
    except (KeyError, TypeError, AssertionError, ValueError, UndefinedError) as e:
        if not (TASKS / f"{task}.yaml").exists():
            raise  # not a user's YAML: a bug here or in lm-eval
        raise DataError(f"task {task!r}: lm-eval cannot use {TASKS / task}.yaml ({type(e).__name__}: {e})") from e
    except (OSError, ConnectionError, DatasetsError) as e:
        raise DataError(f"task {task!r}: its data could not be loaded ({isolate.brief(e)})") from None


def batch_for(items: list[Json], tokenizer: Any, most: int) -> int:
    """Items at a time: `most`, or fewer for long items, since some models keep the logits of all positions. It depends on the items
    alone, and is the same for every variant."""
    texts = sorted((" ".join(v for v in row.values() if isinstance(v, str)) for row in items), key=len)[-LOOKED_AT:]
    longest = max((len(tokenizer(text).input_ids) for text in texts), default=0)
    return max(1, min(most, BATCH_TOKENS // max(1, longest)))


def _row(task: str, sample: Json, lm: Any, output_type: str) -> AnswerRow:
    """One answer row from one lm-eval sample."""
    requests = [list(args) for args in sample["arguments"]]
    rolling, generated = output_type == "loglikelihood_rolling", output_type == "generate_until"
    if rolling or generated:
        ids = [lm.tok_encode(text) for text, *_ in requests]
    else:
        ids = [[t for part in lm.encoded(*pair) for t in part] for pair in requests]
    room = [int(how.get("max_gen_toks", lm.max_gen_toks)) for _, how in requests] if generated else [0] * len(ids)
    n_tokens = max(len(tokens) + more for tokens, more in zip(ids, room))
    doc, replies = sample["doc"], sample["filtered_resps"]
    answer: ItemAnswer
    if generated:
        text = str(replies[0])
        answer = {"loglikelihoods": None, "prediction": text, "target": sample["target"], "empty": not text.strip()}
    elif rolling:
        value = float(replies[0][0] if isinstance(replies[0], (list, tuple)) else replies[0])
        size = len(requests[0][0].encode("utf-8"))
        answer = {"loglikelihoods": [value], "bytes": size, "prediction": None, "target": None, "empty": False}
    else:
        values = [float(value) for value, *_ in replies]
        best = max(range(len(values)), key=values.__getitem__)
        answer = {"loglikelihoods": values, "prediction": best, "target": sample["target"], "empty": False}
    return {
        "task": task, "doc_id": sample["doc_id"], "item": doc.get("id"), "slice": doc.get("slice") or doc.get("domain"),
        "cluster": cluster(doc, sample["doc_id"]), "doc_hash": sample["doc_hash"],
        "prompt_hash": sample["prompt_hash"], "target_hash": sample["target_hash"], "filter": sample["filter"],
        "kind": output_type, "first_token_ids": [int(t) for t in next((tokens for tokens in ids if tokens), [])[:4]],
        "n_tokens": n_tokens, "truncated": not rolling and n_tokens > lm.max_length, **answer,
        "non_finite": sum(not math.isfinite(v) for v in answer["loglikelihoods"] or []),
        "acc": next((float(sample[name]) for name in SCORES if name in sample), None),
    }  # fmt: skip


def check(rows: list[AnswerRow], tokenizer: Any) -> str | None:
    """Why the rows cannot be used, or None: non-finite scores, a doubled BOS, no rows at all."""
    if not rows:
        return "no task gave a row"
    if broken := [r for r in rows if r["non_finite"]]:
        first = f"{broken[0]['task']} {broken[0]['doc_id']}"
        return f"{len(broken)} of {len(rows)} items have a log-likelihood that is not finite (first: {first})"
    bos = tokenizer.bos_token_id
    doubled = sum(bos is not None and r["first_token_ids"][:2] == [bos, bos] for r in rows)
    return f"{doubled} prompts begin with two BOS tokens (id {bos})" if doubled else None


def task_hashes(tasks: Iterable[str]) -> dict[str, str]:
    """{file: sha256} of every file of the local tasks."""
    files = [file for name in tasks if name in local_tasks() for file in task_files(name)]
    return {name: sha256 for file in files for name, sha256 in sets_digest(file).items()}


def answers(
    variant: str, settings: params.Params, meta: AnswersMeta
) -> tuple[list[AnswerRow], str | None, str | None, Look | None]:
    """(the variant's rows, why they are invalid, why they hold no second answers, where they ended early), None where that does not
    apply. meta: the rows' own, so far."""
    chosen = settings.variant(variant)
    folder = artifacts.model_dir(variant)
    engine = engines.load(chosen.engine, folder, threads=settings.thread_count, **chosen.engine_options)
    looks = looks_at(variant, settings, meta)
    with tempfile.TemporaryDirectory() as tmp:
        rows = evaluate(engine, settings.evaluate, settings.amount.tasks, settings.seed, Path(tmp), looks)
        asked = len(clusters(settings.amount.tasks, settings.seed)) if looks else 0
        end = looks.record(len({(row["task"], row["doc_id"]) for row in rows}), asked) if looks else None
        return rows, check(rows, engine.tokenizer), answer_again(rows, engine, settings, Path(tmp)), end


def looks_at(variant: str, settings: params.Params, meta: AnswersMeta) -> Looks | None:
    """Looks before the last answer. None if the reference has no answers to the same items in the same way, and for a cast, whose
    second answers come last."""
    if settings.variant(variant).quantizer == "cast" or not rules_that_end(settings, variant, "evaluate"):
        return None
    if (reference := reference_answers(settings)) is None:
        return None
    (beside, theirs), items = reference, clusters(settings.amount.tasks, settings.seed)
    asked = [(m["sets"], m["batch_size"], m["seed"], m["status"]) for m in (meta, beside)]
    if asked[0] != asked[1] or items.keys() != {(row["task"], row["doc_id"]) for row in theirs}:
        return None

    def measure(b: Builder, rows: list[AnswerRow]) -> None:
        answer_metrics(b, pair(rows, of_same_items(rows, theirs)), settings.evaluate.allow_truncated, beside["once"])

    return looks_of(settings, variant, "evaluate", len(set(items.values())), measure)


def answer_again(rows: list[AnswerRow], engine: Any, settings: params.Params, scratch: Path) -> str | None:
    """Add `again` to the rows: the same weights' answers in float32. Returns why that is impossible, or None. Processors sum 16-bit
    products in different orders, so near ties fall either way; float32 is the same on all, and stands for another processor.
    Only possible with 16-bit weights."""
    if engine.name != "hf":
        return f"engine {engine.name!r} has one arithmetic"
    try:
        engine.to_float32()
    except Unsupported as e:
        return str(e)
    rolling = {row["task"] for row in rows if row["kind"] == "loglikelihood_rolling"}
    tasks = {name: count for name, count in settings.amount.tasks.items() if name not in rolling}
    repeated = evaluate(engine, settings.evaluate, tasks, settings.seed, scratch)
    for row, again in zip((row for row in rows if row["task"] not in rolling), repeated, strict=True):
        row["again"] = {"loglikelihoods": again["loglikelihoods"], "prediction": again["prediction"], "acc": again["acc"]}
    return None


def main(variant: str) -> None:
    """Answer the tasks with VARIANT."""
    watch = artifacts.Stopwatch("evaluate", variant)
    settings = params.load()
    settings.variant(variant)
    folder = artifacts.model_dir(variant)
    manifest = records.read(folder / artifacts.MANIFEST, ModelManifest)
    meta: AnswersMeta = {
        "variant": variant, "model": manifest["digest"], "sets": task_hashes(settings.amount.tasks),
        "batch_size": settings.evaluate.batch_size, "seed": settings.seed, "versions": artifacts.versions(),
        "status": "ok", "reason": None, "once": None,
    }  # fmt: skip
    rows: list[AnswerRow]
    with artifacts.recording(meta, artifacts.answers(variant)) as rows:
        artifacts.check_model(folder, manifest)
        if cannot := unanswerable(settings.amount.tasks, folder, settings.evaluate.allow_truncated, settings.seed):
            raise DataError("\n       ".join(cannot))
        answered, why, meta["once"], look = isolate.isolated(answers, variant, settings, meta, what=f"evaluate {variant}")
        rows += answered
        if look:
            meta["look"] = look
        meta["status"], meta["reason"] = "invalid" if why else "ok", why
    scored = [r["acc"] for r in rows if r["acc"] is not None]
    what = f"{meta['status']}: {meta['reason']}"
    if meta["status"] == "ok":
        what = f"{100 * sum(scored) / max(1, len(scored)):.1f} % of {len(scored)} items right{stopped(meta.get('look'))}"
    cli.say("evaluate", f"{variant}: {what}, {watch.done():.1f} s")


if __name__ == "__main__":
    cli.run(main)
    cli.leave()
