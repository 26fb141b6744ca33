"""Run what is out of date on many GPUs or machines: DVC's graph says what, Ray where, DVC's cache carries the results.

A stage starts when all that it depends on is there, in a copy of the project (core/copies.py). Its entry of dvc.lock is carried
into this folder's, its outputs are checked out from the cache, and at the end plain `dvc repro` runs nothing."""

from __future__ import annotations

import math
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple, Protocol

import typer
from filelock import FileLock, Timeout

from pipeline.core import artifacts, cli, copies, git, params, quota
from pipeline.core.copies import Job, Ran
from pipeline.core.errors import ArtifactError, QuantgateError
from pipeline.core.params import Params
from pipeline.core.records import Json
from pipeline.engines._speculation import drafting_variant
from pipeline.gating import freshness
from pipeline.preflight import room
from pipeline.preflight.model import base_folder
from pipeline.speed import hardware

HEAD = ("check", "download", "gate", "report", "track")  # run in this folder: they use git, or what lies beside the project
DRAFTED = ("diverge", "evaluate", "benchmark", "compare")  # stages that read the model that drafts for theirs
ALONE = ("floor",)  # beside the stages that depend on reports/machine.yaml: nothing else runs on their node
LOGS = artifacts.LOGS / "fan-out"
NODE = "node"  # the resource that is a whole machine: stages that time take all of it
RETRIES = 3  # of a stage whose worker or machine was lost; one that fails for its own reason is not repeated


class Needs(NamedTuple):
    """What a stage takes of a node. memory: bytes."""

    alone: bool = False
    gpus: int = 0
    memory: float = 0.0


class Pool(Protocol):
    """Where jobs run. `slots`: how many at once; `next` waits for any, and gives (stage, how it ended or how it was lost)."""

    slots: int

    def start(self, job: Job, needs: Needs, tree: bytes) -> None: ...
    def next(self) -> tuple[str, Ran | str]: ...


# ---- what to run next: pure --------------------------------------------------------------------------------------------------
class Line:
    """Stages in the order of a serial run, what each waits for, and how far each is: waiting, queued, running, done or failed."""

    def __init__(self, after: dict[str, list[str]]) -> None:
        self.after = after
        self.state = dict.fromkeys(after, "waiting")

    def are(self, state: str) -> list[str]:
        return [name for name, is_now in self.state.items() if is_now == state]

    def ready(self) -> list[str]:
        """Stages whose inputs are all there."""
        return [name for name in self.are("waiting") if not self.waits_for(name)]

    def waits_for(self, name: str) -> list[str]:
        return [before for before in self.after[name] if self.state[before] != "done"]

    def held_up_by(self, name: str) -> list[str]:
        """Failed stages that a stage depends on, at any distance."""
        found, beyond = set[str](), list(self.after[name])
        while beyond:
            if (before := beyond.pop()) not in found:
                found.add(before)
                beyond += self.after[before]
        return [before for before in self.are("failed") if before in found]


def merged(lock: Json, name: str, entry: Json | None, order: Iterable[str]) -> Json:
    """dvc.lock with one stage's entry, or (None) without it, its stages in `order` as a serial run leaves them; others behind."""
    stages = {k: v for k, v in lock.get("stages", {}).items() if k != name} | ({} if entry is None else {name: entry})
    rank = {n: k for k, n in enumerate(order)}
    return {"schema": "2.0", **lock, "stages": dict(sorted(stages.items(), key=lambda item: rank.get(item[0], len(rank))))}


def to_the_end(after: Mapping[str, list[str]]) -> dict[str, float]:
    """{stage: seconds from its start to the end of the longest chain behind it}, by earlier durations; unknown ones take none."""
    left = {name: artifacts.seconds_of(name)[0] or 0.0 for name in after}
    own = dict(left)
    for name in reversed(list(after)):
        for before in after[name]:
            left[before] = max(left[before], own[before] + left[name])
    return left


def minutes_left(line: Line, slots: int) -> str:
    """By earlier durations of what is not done yet, as if every slot had work."""
    seconds = [artifacts.seconds_of(name)[0] for state in ("waiting", "queued", "running") for name in line.are(state)]
    unknown = seconds.count(None)
    least = sum(s or 0 for s in seconds) / slots / 60
    return f"at least {least:.0f} min left ({unknown} never timed here)" if unknown else f"about {least:.0f} min left"


# ---- this folder -------------------------------------------------------------------------------------------------------------
class Folder:
    """The head's folder: DVC's project, to which results are carried."""

    def __init__(self, repo: Any, remote: bool = False, also: Mapping[str, list[str]] = MappingProxyType({})) -> None:
        from dvc.repo.reproduce import get_active_graph, plan_repro

        self.repo, self.remote = repo, remote
        copies.sweep(Path(repo.stage_cache.cache_dir))
        graph = get_active_graph(repo.index.graph)  # an edge leads from a stage to what it depends on
        self.stages = {s.addressing: s for s in plan_repro(graph, repo.stage.collect("dvc.yaml"))}
        inputs = {name: [s.addressing for s in graph.successors(stage)] for name, stage in self.stages.items()}
        self.after = {name: [*before, *also.get(name, [])] for name, before in inputs.items()}
        before = self._parsed((git.show("HEAD", copies.LOCK) or b"").decode()).get("stages", {})
        kept = before if before.keys() <= self._lock().get("stages", {}).keys() else {}  # not where dvc.lock was deleted
        self.order = list(dict.fromkeys([*kept, *self.stages]))  # a serial run puts new ones at the end

    def outputs(self) -> list[str]:
        return [out.def_path for stage in self.stages.values() for out in stage.outs]

    def times(self, name: str) -> bool:
        return name in ALONE or any(dep.def_path == str(hardware.MACHINE) for dep in self.stages[name].deps)

    def has(self, name: str) -> bool:
        """Whether a stage's outputs are here: unchanged, or restored from DVC's cache."""
        from dvc.stage.cache import RunCacheNotFoundError
        from dvc.stage.serialize import to_single_stage_lockfile
        from dvc_data.hashfile.hash_info import HashInfo

        stage = self.stages[name]
        with self.repo.lock:
            if not stage.changed():
                return True
            if not all(dep.exists for dep in stage.deps):  # the stage will say so
                return False
            if not stage.outs_cached():  # DVC trusts an entry of dvc.lock whose outputs nobody has, and asks the run cache nothing
                for out in stage.outs:
                    out.hash_info = HashInfo()
            stage.remove_outs()
            try:
                self.repo.stage_cache.restore(stage, pull=self.remote)
            except RunCacheNotFoundError:
                return False
            stage.save(run_cache=False)
            stage.commit()
        self.put(name, to_single_stage_lockfile(stage))
        return True

    def job(self, name: str) -> Job:
        inputs = self.after[name]
        if self.remote and inputs:
            self.repo.push(inputs)
        files = {str(f): f.read_bytes() for before in inputs for out in self._uncached(before) for f in copies.below(Path(out))}
        if (own := Path(".dvc/config.local")).exists():  # git does not have it
            files[str(own)] = own.read_bytes()
        lock = self._dumped(merged(self._lock(), name, None, self.order))
        cache = None if self.remote else str(self.repo.cache.local_cache_dir)
        return Job(name, str(Path.cwd()), inputs, lock, files, self._uncached(name), cache, os.environ.get("OMP_NUM_THREADS"))

    def carry(self, name: str, ran: Ran) -> None:
        """Take over what a stage wrote in its copy. Killed between two lines, the next start restores or repeats the stage."""
        from dvc.stage.loader import StageLoader

        for path, content in ran.files.items():
            copies.write(Path(path), content)
        copies.write(LOGS / f"{name}.log", ran.log)
        if ran.code:
            return
        stage, entry = self.stages[name], self._parsed(ran.lock)["stages"][name]
        StageLoader.fill_from_lock(stage, entry)
        if self.remote:
            for objects in stage.get_used_objs().values():
                self.repo.cloud.pull(objects)
        if not stage.outs_cached():  # before DVC's checkout, which ends in a stack of Python's for a file
            how = "is the remote the same from every machine?" if self.remote else "is it on a shared disk? Else: --remote"
            raise ArtifactError(f"{name} ran on {ran.host}; its outputs are not in {self.repo.cache.local_cache_dir}: {how}")
        with self.repo.lock:
            stage.checkout(force=True)
        self.put(name, entry)

    def run(self, name: str) -> int:
        """Run a stage in this folder."""
        LOGS.mkdir(parents=True, exist_ok=True)
        with (LOGS / f"{name}.log").open("w") as log:
            return subprocess.run([sys.executable, "-m", *copies.REPRO, name], stdout=log, stderr=subprocess.STDOUT).returncode

    def _uncached(self, name: str) -> list[str]:
        return [out.def_path for out in self.stages[name].outs if not out.use_cache]

    def put(self, name: str = "", entry: Json | None = None) -> None:
        """Write an entry into dvc.lock, whose entries are then in a serial run's order."""
        with self.repo.lock:
            artifacts.write_text(copies.LOCK, self._dumped(merged(self._lock(), name, entry, self.order)))

    def _lock(self) -> Json:
        return self._parsed(copies.LOCK.read_text(encoding="utf-8") if copies.LOCK.exists() else "")

    @staticmethod
    def _parsed(text: str) -> Json:
        from dvc.utils.serialize import loads_yaml

        return dict(loads_yaml(text) or {})

    @staticmethod
    def _dumped(lock: Json) -> str:
        from dvc.utils.serialize import dumps_yaml

        return str(dumps_yaml(lock))


def unlisted(settings: Params) -> dict[str, list[str]]:
    """{stage: stages whose outputs it reads though dvc.yaml cannot say so}: a draft's model; for looks the reference's answers."""
    drafts = {name: draft for name, v in settings.variants.items() if (draft := drafting_variant(v.engine_options))}
    found = {f"{stage}@{name}": [f"quantize@{draft}"] for name, draft in drafts.items() for stage in DRAFTED}
    others = settings.variants.keys() - {settings.reference} if settings.amount.stop == "decided" else ()
    answers = f"evaluate@{settings.reference}"
    return found | {f"evaluate@{name}": [*found.get(f"evaluate@{name}", []), answers] for name in others}


def fan_out(
    pool: Pool, needs: Callable[[str], Needs], remote: bool = False, also: Mapping[str, list[str]] = MappingProxyType({})
) -> Line:
    """Run every stage of dvc.yaml that is out of date, and what follows, as far as nothing fails. also: see `unlisted`."""
    copies.COPIES.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(f"{copies.COPIES}.lock", timeout=0), freshness.project("this folder") as repo:
            for left in copies.COPIES.iterdir():  # by a start that was killed
                shutil.rmtree(left, ignore_errors=True)
            return _all(Folder(repo, remote, also), pool, needs)
    except Timeout:
        raise ArtifactError("another fan-out is at work in this folder") from None


def _all(folder: Folder, pool: Pool, needs: Callable[[str], Needs]) -> Line:
    line, tree, left = Line(folder.after), copies.pack(folder.outputs()), to_the_end(folder.after)
    while line.ready() or line.are("queued") or line.are("running"):
        for name in line.ready():
            if folder.has(name):
                line.state[name] = "done"
            elif name in HEAD:
                cli.say("fan-out", f"{name} runs in this folder, log: {LOGS}/{name}.log")
                line.state[name] = "failed" if folder.run(name) else "done"
            else:
                line.state[name] = "queued"
        # the longest chain first; what times waits for an empty machine, so it comes last
        for name in sorted(line.are("queued"), key=lambda name: (folder.times(name), -left[name])):
            if len(line.are("running")) < pool.slots:
                pool.start(folder.job(name), needs(name)._replace(alone=folder.times(name)), tree)
                line.state[name] = "running"
        if line.are("running") and not line.ready():
            name, ran = pool.next()
            line.state[name], how = "failed", str(ran)
            if not isinstance(ran, str):
                folder.carry(name, ran)
                line.state[name] = "failed" if ran.code else "done"
                how = f"{line.state[name]} on {ran.host} after {ran.seconds:.0f} s"
            cli.say("fan-out", f"{name} {how}; {_rest(line, pool)}")
    folder.put()  # stages that ran in this folder stand where DVC put them
    return line


def _rest(line: Line, pool: Pool) -> str:
    counts = Counter(line.state.values())
    waiting = next(((n, w) for n in line.are("waiting") if (w := line.waits_for(n)) and not line.held_up_by(n)), None)
    first = f" ({waiting[0]} waits for {', '.join(waiting[1][:2])}{', ...' * (len(waiting[1]) > 2)})" if waiting else ""
    behind = counts["queued"] + counts["waiting"]
    numbers = f"{counts['done']} of {len(line.state)} done, {counts['running']} running, {behind} to come{first}"
    return f"{numbers}; {minutes_left(line, pool.slots)}"


# ---- Ray ---------------------------------------------------------------------------------------------------------------------
class Cluster:
    """Ray, started here or at `address`. at_once: stages on a node that do not time; None: as many as a node has GPUs."""

    def __init__(self, address: str | None, at_once: int | None) -> None:
        os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "RAY_task_oom_retries": str(RETRIES)}
        if not address:  # Ray listens on every interface: nobody without this process's token is answered
            os.environ["RAY_AUTH_MODE"] = "token"
            os.environ["RAY_AUTH_TOKEN"] = os.environ.get("RAY_AUTH_TOKEN") or secrets.token_hex(32)
        try:
            import ray
        except ImportError:
            how = "pip install -e '.[ray]' -c constraints.txt -c constraints-dev.txt"
            raise QuantgateError(f"Ray is not installed: {how}") from None
        for module in (copies, hardware, quota):  # a cluster may have another version of them
            ray.cloudpickle.register_pickle_by_value(module)
        mine = {} if address else {"num_cpus": at_once or os.cpu_count(), "resources": {NODE: 1}}
        try:
            dashboard = ray.init(address or "local", logging_level="ERROR", **mine).dashboard_url
        except Exception as e:  # of Ray's many kinds; it has no one class
            raise QuantgateError(f"Ray does not start at {address or 'this machine'}: {_brief(e)}") from None
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # as before: Ray's prints a stack
        if dashboard:
            cli.say(
                "fan-out", f"Ray's dashboard: http://{dashboard}" + " (to open it, set RAY_AUTH_TOKEN beforehand)" * (not address)
            )
        self._ray, self._running = ray, dict[Any, str]()
        self._tree: Any = None
        self.nodes = [n for n in ray.nodes() if n["Alive"] and NODE in n["Resources"]]
        if not self.nodes:
            how = f"ray start --resources '{{\"{NODE}\": 1}}' ..."
            raise QuantgateError(f"no machine of {address} has Ray's resource {NODE!r}: {how}")
        cards = self._of_each(partial(quota.card_bytes, None))  # whatever CUDA_VISIBLE_DEVICES Ray gives to who asks
        gpus = [int(n["Resources"].get("GPU", 0)) for n in self.nodes]
        have = [sizes[:n] or [math.inf] * n for sizes, n in zip(cards, gpus)]  # of unknown size without nvidia-smi
        self.largest = room.Room(max(n["Resources"]["memory"] for n in self.nodes), max(have, key=sum))
        self._at_once = at_once or max(1, *gpus)
        self.slots = self._at_once * len(self.nodes)
        self._timing = {n["NodeID"] for n in self.nodes}  # of one class

    def choose_machine(self) -> None:
        """Write the class of machine that timings are of: today's if a node is of it, else the most frequent."""
        nodes, texts = [n["NodeID"] for n in self.nodes], self._of_each(hardware.of_this)
        now = hardware.MACHINE.read_text(encoding="utf-8") if hardware.MACHINE.exists() else ""
        chosen = now if now in texts else Counter(texts).most_common(1)[0][0]
        if chosen != now:
            artifacts.write_text(hardware.MACHINE, chosen)
        self._timing = {node for node, text in zip(nodes, texts) if text == chosen}

    def _of_each(self, ask: Callable[[], Any]) -> list[Any]:
        """What every node answers."""
        task = self._ray.remote(lambda: ask())
        places = [self._on(node["NodeID"]) for node in self.nodes]
        return list(self._ray.get([task.options(num_cpus=0, scheduling_strategy=place).remote() for place in places]))

    def had(self, needs: Needs) -> Needs:
        """As much of what a stage takes as one node has: Ray would wait for more for ever."""
        nodes = [n["Resources"] for n in self.nodes if not needs.alone or n["NodeID"] in self._timing]
        gpus = min(needs.gpus, max(int(has.get("GPU", 0)) for has in nodes))
        memory = max(has["memory"] for has in nodes if has.get("GPU", 0) >= gpus)
        return needs._replace(gpus=gpus, memory=min(needs.memory, memory))

    def start(self, job: Job, needs: Needs, tree: bytes) -> None:
        needs, where = self.had(needs), {"ray.io/node-id": f"in({','.join(self._timing)})"} if needs.alone else {}
        share = 1 if needs.alone else int(10000 / self._at_once) / 10000  # Ray counts in parts of 10 000
        task = self._ray.remote(copies.run).options(
            name=job.stage, num_cpus=1, num_gpus=needs.gpus, memory=int(needs.memory), resources={NODE: share},
            max_retries=RETRIES, label_selector=where,
        )  # fmt: skip
        self._tree = self._tree or self._ray.put(tree)  # once, for all
        self._running[task.remote(job, self._tree)] = job.stage

    def next(self) -> tuple[str, Ran | str]:
        (ended,), _ = self._ray.wait(list(self._running), num_returns=1)
        name = self._running.pop(ended)
        try:
            return name, self._ray.get(ended)
        except self._ray.exceptions.RayError as e:
            return name, f"failed: {_brief(e)}"

    def _on(self, node: str) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        return NodeAffinitySchedulingStrategy(node, soft=False)


def _brief(e: Exception) -> str:
    """The end of an error of Ray's, whose many lines begin with a stack."""
    return " ".join(str(e).split())[-300:]


def needs_of(settings: Params, node: room.Room) -> Callable[[str], Needs]:
    """What a stage takes of the largest node, whose room is said to be too small where it is."""
    folder = base_folder(settings)
    found = room.needs(settings, folder) if folder else {}
    for line in room.too_large(settings, folder, node) if folder else []:
        cli.say("fan-out", line)

    def of(name: str) -> Needs:
        need = found.get(name, room.Need(0.0))
        return Needs(gpus=need.cards_of(node), memory=min(need.memory, node.memory))

    return of


def main(
    address: Annotated[str | None, typer.Option(help="Ray's cluster: auto, or ray://HOST:10001; none: this machine.")] = None,
    at_once: Annotated[int | None, typer.Option(min=1, help="Stages at once on a node; none: as many as it has GPUs.")] = None,
    remote: Annotated[bool, typer.Option(help="No disk is shared: carry through DVC's default remote.")] = False,
) -> None:
    """Run what is out of date on many GPUs or machines, by Ray."""
    settings, began = params.load(), time.monotonic()
    cluster = Cluster(address, at_once)
    cluster.choose_machine()
    line = fan_out(cluster, needs_of(settings, cluster.largest), remote, unlisted(settings))
    if failed := line.are("failed"):
        skipped = {name: by for name in line.are("waiting") if (by := line.held_up_by(name))}
        cli.say("fan-out", f"not run: {', '.join(f'{name} (for {by[0]})' for name, by in skipped.items()) or 'nothing else'}")
        raise ArtifactError(
            f"{', '.join(failed)} failed; see {LOGS}; the rest is done and kept, the same command goes on from there"
        )
    left = subprocess.run([sys.executable, "-m", "dvc", "repro", "--dry"], capture_output=True, text=True)
    if left.returncode or "Running stage" in left.stdout:
        raise ArtifactError(f"`dvc repro` would still run stages: {left.stdout.strip()[-300:]}{left.stderr.strip()[-300:]}")
    cli.say(
        "fan-out", f"{len(line.state)} stages are up to date, {time.monotonic() - began:.0f} s; next: quantgate report --summary"
    )


if __name__ == "__main__":
    cli.run(main)
