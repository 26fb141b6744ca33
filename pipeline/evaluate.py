"""evaluate: lm-eval tasks, one row per question -> artifacts/answers/<variant>.jsonl

lm-eval does the prompting and scoring; the rows keep what a paired comparison needs later: which item it was (hashes of
document, prompt and target), what the model saw first, and what it answered. No response cache is used: lm-eval's does
not know which model it is for.
"""

from __future__ import annotations

import math
import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline import artifacts, cli, engines, params
from pipeline.errors import DataError, InvalidVariant, Unsupported
from pipeline.evalset import TASKS, load_task, local_tasks, sets_digest, task_files
from pipeline.params import Evaluate

Row = dict[str, Any]
SCORES = ("acc", "exact_match")  # lm-eval's names for "this item was answered correctly"


def evaluate(engine: Any, setup: Evaluate, seed: int) -> list[Row]:
    """Score every task; one row per item, in task and item order."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    if engine.name != "hf":
        raise Unsupported(f"tasks run in engine 'hf' only, not in {engine.name!r}")
    local = local_tasks()
    configs = {name: load_task(name) for name in setup.tasks if name in local}
    # lm-eval's index of its own tasks costs 8 s; it is built only if one of them is asked for
    manager = TaskManager(include_path=str(TASKS), include_defaults=len(configs) < len(setup.tasks))
    rows: list[Row] = []
    for task in setup.tasks:
        chat = bool((configs.get(task, {}).get("metadata") or {}).get("chat"))
        wanted = _subset(local[task], configs[task], setup.limit, seed) if task in configs else None
        rolling = configs.get(task, {}).get("output_type") == "loglikelihood_rolling"
        # whole documents at a time would need gigabytes of logits, and time to touch them
        lm = _lm(engine, min(2, setup.batch_size) if rolling else setup.batch_size)
        found = _run(
            lm_eval,
            model=lm,
            tasks=[task],
            task_manager=manager,
            samples=None if wanted is None else {task: wanted},
            limit=setup.limit if task not in configs else None,
            apply_chat_template=chat,
            log_samples=True,
            bootstrap_iters=0,
            random_seed=seed,
            numpy_random_seed=seed,
            torch_random_seed=seed,
            fewshot_random_seed=seed,
        )
        for name, samples in found["samples"].items():
            rows.extend(_row(name, sample, lm, found["configs"][name]["output_type"]) for sample in samples)
    return rows


def _run(lm_eval: Any, **arguments: Any) -> Any:
    """lm-eval's evaluation; data that a hub does not give is an error in words."""
    try:
        return lm_eval.simple_evaluate(**arguments)
    except (OSError, ConnectionError) as e:
        task = arguments["tasks"][0]
        first = (str(e).strip().splitlines() or ["no message"])[0]
        raise DataError(f"task {task!r}: its data could not be loaded ({type(e).__name__}: {first})") from None


def _lm(engine: Any, batch_size: int) -> Any:
    """lm-eval's own model class around the engine's model.

    float32 log-softmax: in bfloat16, its default here, a document's log-likelihood moves in steps of 8 nats.
    """
    from lm_eval.models.huggingface import HFLM

    return HFLM(
        pretrained=engine.model,
        tokenizer=engine.tokenizer,
        batch_size=batch_size,
        max_length=engine.max_length,
        softmax_dtype="float32",
    )


def _subset(path: Path, config: dict[str, Any], limit: int | None, seed: int) -> list[int] | None:
    """Indices of a fixed-seed subset in file order; a smaller limit's items are among a larger one's."""
    if limit is None:
        return None
    lines = (line for file in task_files(path, config) for line in file.read_text(encoding="utf-8").split("\n"))
    n = sum(1 for line in lines if line.strip())
    order = list(range(n))
    random.Random(seed).shuffle(order)
    return sorted(order[:limit])


def _row(task: str, sample: Row, lm: Any, output_type: str) -> Row:
    """One answer row from one lm-eval sample."""
    requests = [list(args) for args in sample["arguments"]]
    lengths, first = _tokens(lm, requests, output_type)
    doc = sample["doc"]
    row: Row = {
        "task": task, "doc_id": sample["doc_id"], "item": doc.get("id"), "slice": doc.get("slice") or doc.get("domain"),
        "cluster": doc.get("cluster") or doc.get("id") or str(sample["doc_id"]), "doc_hash": sample["doc_hash"],
        "prompt_hash": sample["prompt_hash"], "target_hash": sample["target_hash"], "filter": sample["filter"],
        "kind": output_type, "first_token_ids": first, "n_tokens": max(lengths),
        "truncated": output_type != "loglikelihood_rolling" and max(lengths) > lm.max_length,
    }  # fmt: skip
    if output_type == "generate_until":
        text = str(sample["filtered_resps"][0])
        row |= {"loglikelihoods": None, "prediction": text, "target": sample["target"], "empty": not text.strip()}
    elif output_type == "loglikelihood_rolling":
        reply = sample["filtered_resps"][0]
        value = float(reply[0] if isinstance(reply, (list, tuple)) else reply)
        row |= {
            "loglikelihoods": [value],
            "bytes": len(requests[0][0].encode("utf-8")),
            "prediction": None,
            "target": None,
            "empty": False,
        }
    else:
        values = [float(r[0]) for r in sample["filtered_resps"]]
        best = max(range(len(values)), key=values.__getitem__)
        row |= {"loglikelihoods": values, "prediction": best, "target": sample["target"], "empty": False}
    row["non_finite"] = sum(not math.isfinite(v) for v in row["loglikelihoods"] or [])
    row["acc"] = next((float(sample[name]) for name in SCORES if name in sample), None)
    return row


def _tokens(lm: Any, requests: list[Any], output_type: str) -> tuple[list[int], list[int]]:
    """Token count of each request, and the first real token ids that the model saw."""
    lengths = []
    first: list[int] = []
    for request in requests:
        if output_type == "generate_until":
            ids = lm.tok_encode(request[0])
            lengths.append(len(ids) + int(request[1].get("max_gen_toks", lm.max_gen_toks)))
        elif output_type == "loglikelihood_rolling":
            ids = lm.tok_encode(request[0])
            lengths.append(len(ids))
        else:
            context, continuation = lm._encode_pair(request[0], request[1])
            ids = [*context, *continuation]
            lengths.append(len(ids))
        first = first or [int(t) for t in ids[:4]]
    return lengths, first


def check(rows: list[Row], tokenizer: Any) -> str | None:
    """Why the rows cannot be used, or None: non-finite scores, a doubled BOS, no rows at all."""
    if not rows:
        return "no task gave a row"
    broken = [r for r in rows if r["non_finite"]]
    if broken:
        first = f"{broken[0]['task']} {broken[0]['doc_id']}"
        return f"{len(broken)} of {len(rows)} items have a log-likelihood that is not finite (first: {first})"
    bos = tokenizer.bos_token_id
    doubled = [r for r in rows if bos is not None and r["first_token_ids"][:2] == [bos, bos]]
    if doubled:
        return f"{len(doubled)} prompts begin with two BOS tokens (id {bos})"
    return None


def task_hashes(setup: Evaluate) -> Iterator[tuple[str, str]]:
    """(file, sha256) of every file behind the local tasks."""
    local = local_tasks()
    for name in setup.tasks:
        if name in local:
            for file in (local[name], *task_files(local[name], load_task(name))):
                yield from sets_digest(file).items()


def main(variant: str) -> None:
    """Answer the tasks with VARIANT."""
    watch = artifacts.Stopwatch("evaluate", variant)
    settings = params.load()
    chosen = settings.variant(variant)
    folder, path = artifacts.model_dir(variant), artifacts.answers(variant)
    manifest = artifacts.read_manifest(folder)
    meta: dict[str, Any] = {
        "variant": variant, "model": manifest["digest"], "sets": dict(task_hashes(settings.evaluate)),
        "batch_size": settings.evaluate.batch_size, "seed": settings.seed, "versions": artifacts.versions(),
    }  # fmt: skip
    rows: list[Row] = []
    if manifest["status"] == "ok":
        artifacts.verify_files(folder, manifest)
        try:
            engine = engines.load(chosen.engine, folder, threads=settings.thread_count, **chosen.engine_options)
            with tempfile.TemporaryDirectory() as tmp:
                # `datasets` keeps parsed files by path; a folder of our own means an edited set is never an old one
                os.environ["HF_DATASETS_CACHE"] = tmp
                rows = evaluate(engine, settings.evaluate, settings.seed)
            why = check(rows, engine.tokenizer)
            status = "invalid" if why else "ok"
        except InvalidVariant as e:
            status, why = "invalid", str(e)
        except Unsupported as e:
            status, why = "unsupported", str(e)
    else:
        status, why = manifest["status"], manifest["reason"]
    artifacts.write_jsonl(path, rows)
    artifacts.write_json(artifacts.meta_of(path), meta | {"status": status, "reason": why})
    scored = [r["acc"] for r in rows if r["acc"] is not None]
    told = f"{status}: {why}"
    if status == "ok":
        told = f"{100 * sum(scored) / max(1, len(scored)):.1f} % of {len(scored)} items right"
    cli.say("evaluate", f"{variant}: {told}, {watch.done():.1f} s")


if __name__ == "__main__":
    cli.run(main)
