"""`quantgate doctor`: this field's usual troubles as checks. Each says what it saw and, if needed, what to do.

A check that cannot look says so, which is not a problem. Nothing is changed, and only one request is sent, to MLflow.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Literal, NamedTuple
from urllib.parse import urlsplit

import typer

from pipeline import track
from pipeline.core import artifacts, git, install, params, quota, records, secrets
from pipeline.core.errors import QuantgateError
from pipeline.core.explain import nominal_bits
from pipeline.core.params import HubModel, Params
from pipeline.gating import freshness
from pipeline.preflight import room as preflight_room
from pipeline.preflight.model import base_folder
from pipeline.tracking import connection

BUSY = 0.5  # other load, in processors, from which timings suffer
SKEW_S = 2.0
UI_PORT = 5000
SLOW = 0.6  # of a card's bandwidth; less means another clock, a shared card or a wrong mode
# GB/s by the makers' data sheets; the first name that is part of the card's name counts
KNOWN = {
    "H200": 4800, "H100 NVL": 3900, "H100 PCIe": 2000, "H100": 3350, "A100-SXM4-80GB": 2039, "A100": 1555, "L40": 864, "L4": 300,
    "A10": 600, "T4": 320, "V100": 900, "RTX 4090": 1008, "RTX 3090": 936,
}  # fmt: skip


class Finding(NamedTuple):
    """note: worth knowing; problem: something will fail or a number will be wrong. do: the remedy, or empty."""

    about: str
    state: Literal["ok", "note", "problem"]
    seen: str
    do: str = ""


def schema_fault(uri: str) -> str | None:
    """Why MLflow refuses a database by the version of its tables, or None. A server checks its own."""
    if urlsplit(uri).scheme in ("http", "https"):
        return None
    import mlflow.store.db_migrations
    import sqlalchemy
    from alembic.runtime.migration import MigrationContext
    from alembic.script import ScriptDirectory

    newest = ScriptDirectory(str(Path(mlflow.store.db_migrations.__file__).parent)).get_current_head()
    engine = sqlalchemy.create_engine(uri, poolclass=sqlalchemy.NullPool)
    with engine.connect() as connection:
        now = MigrationContext.configure(connection).get_current_revision()
    return None if now == newest else f"its tables are of version {now}, this MLflow's are of {newest}"


def torch_and_card(settings: Params) -> Iterator[Finding]:
    import torch

    drivers = sorted(Path("/proc/driver/nvidia/gpus").glob("*"))
    if torch.cuda.is_available():
        name, capability = torch.cuda.get_device_name(), "sm_{}{}".format(*torch.cuda.get_device_capability())
        built = torch.cuda.get_arch_list()
        if any(a.startswith(capability[:-1]) for a in built):
            yield Finding("GPU", "ok", f"{name}, torch {torch.__version__}")
        else:
            seen = f"{name} is {capability}; torch has {' '.join(built)}"
            yield Finding("GPU", "problem", seen, "install a torch built for this card")
    elif drivers and torch.version.cuda is None:
        yield Finding("GPU", "problem", f"a card, but torch {torch.__version__} is a CPU build", "install torch's CUDA build")
    elif drivers:
        seen = f"a card that torch {torch.__version__} (CUDA {torch.version.cuda}) cannot use"
        yield Finding("GPU", "problem", seen, "compare with the driver's CUDA in nvidia-smi; see CUDA_VISIBLE_DEVICES")
    else:
        yield Finding("GPU", "note", "none; everything runs on the processor")


def processor(settings: Params) -> Iterator[Finding]:
    governors = {p.read_text().strip() for p in Path("/sys/devices/system/cpu").glob("cpu*/cpufreq/scaling_governor")}
    if slow := governors - {"performance"}:
        yield Finding("CPU governor", "note", ", ".join(sorted(slow)), "for steady timings: cpupower frequency-set -g performance")
    load, cores = os.getloadavg()[0], quota.processors()
    busy = load > BUSY
    advice = "stop other work before benchmark and serve" * busy
    yield Finding("other load", "note" if busy else "ok", f"{load:.1f} on {cores} processors", advice)
    if settings.thread_count > cores:
        yield Finding("threads", "problem", f"{settings.thread_count} on {cores} processors", "set threads: auto")


def builds(settings: Params) -> Iterator[Finding]:
    built = install.built_for(sys.executable)
    compiler = shutil.which("c++") or shutil.which("g++")
    again = "install g++, then python3 -m pipeline.core.install"
    if built is None:
        yield Finding("llama.cpp", "note", "not installed: its variants are unsupported", again)
    elif compiler and not install.as_asked(built, sets := install.instruction_sets(install.native_macros(compiler))):
        missing = " ".join(sorted({s for s in sets if s.startswith("AVX")} - set(built))) or "some of this machine's instructions"
        how = "python3 -m pipeline.core.install compiles it for this machine"
        yield Finding("llama.cpp", "note", f"compiled without {missing}", how)
    else:
        yield Finding("llama.cpp", "ok", f"compiled for {' '.join(s for s in built if s.isupper())}")


def room(settings: Params) -> Iterator[Finding]:
    folder = base_folder(settings)
    free = shutil.disk_usage(Path.cwd()).free
    if folder is None:
        yield Finding("disk and memory", "note", f"{free / 1e9:.0f} GB free; the model is not here yet, so its need is not known")
        return
    need = preflight_room.disk_bytes(settings, folder)
    short, seen = need > free, f"{need / 1e9:.1f} GB needed, {free / 1e9:.0f} GB free"
    yield Finding("disk", "problem" if short else "ok", seen, "make room" * short)
    have, needs = preflight_room.here(), preflight_room.needs(settings, folder)
    most = max(needs, key=lambda stage: needs[stage].memory)
    seen = f"{most} needs {needs[most].memory / 1e9:.1f} GB, {have.memory / 1e9:.0f} GB here"
    yield Finding("memory", "problem" if needs[most].memory > have.memory else "ok", seen)
    for line in preflight_room.too_large(settings, folder, have):
        yield Finding("room", "problem", *line.split("; ", 1))


def hub(settings: Params) -> Iterator[Finding]:
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    existing = next(p for p in (home, *home.parents) if p.exists())
    if not os.access(existing, os.W_OK):
        yield Finding("HF_HOME", "problem", f"{home} is not writable", "set HF_HOME to a folder that is")
    offline = [name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE") if os.environ.get(name)]
    if not isinstance(settings.model, HubModel):
        yield Finding("hub", "ok", "not needed: the model comes from elsewhere")
    elif offline:
        yield Finding("hub", "problem", f"{' '.join(offline)} is set", "unset it, or use model: {source: path}")
    else:
        from huggingface_hub.utils import get_token

        has = get_token() is not None
        advice = "gated models need `hf auth login`" * (not has)
        yield Finding("hub token", "ok" if has else "note", "present" if has else "none", advice)


def ports(settings: Params) -> Iterator[Finding]:
    with socket.socket() as probe:
        probe.settimeout(1)
        used = probe.connect_ex(("127.0.0.1", UI_PORT)) == 0
    seen = f"{UI_PORT} is {'in use' if used else 'free'}"
    yield Finding("port of `make ui`", "note" if used else "ok", seen, "mlflow ui --port 5001" * used)


def clocks(settings: Params) -> Iterator[Finding]:
    with tempfile.NamedTemporaryFile(dir=Path.cwd()) as file:
        skew = Path(file.name).stat().st_mtime - time.time()
    if abs(skew) > SKEW_S:
        advice = "synchronize both (chrony, NTP): make compares times"
        yield Finding("clocks", "problem", f"the disk's clock is {skew:+.0f} s off", advice)
    else:
        yield Finding("clocks", "ok", f"disk and system agree, resolution {time.get_clock_info('monotonic').resolution:.0e} s")


def version_control(settings: Params) -> Iterator[Finding]:
    if git.line("rev-parse", "--is-inside-work-tree") != "true":
        yield Finding("git", "problem", "not a git repository", "clone it, or git init: DVC and baselines need it")
        return
    shallow = git.line("rev-parse", "--is-shallow-repository") == "true"
    changed = [p for p in ("params.yaml", "dvc.lock", "reports") if git.line("status", "--porcelain", "--", p)]
    if shallow:
        yield Finding("git", "note", "a shallow clone: baselines may be missing", "git fetch --unshallow")
    if changed:
        yield Finding("git", "note", f"not committed: {', '.join(changed)}", "commit results together with what made them")
    if not (shallow or changed):
        yield Finding("git", "ok", "results and params are committed")


def remote(settings: Params) -> Iterator[Finding]:
    with freshness.project() as repo:
        remotes, default = repo.config["remote"], repo.config["core"].get("remote")
    if not remotes:
        advice = "dvc remote add -d NAME URL, to pair baselines in CI"
        yield Finding("DVC remote", "note", "none: rows stay on this machine", advice)
        return
    url = str(remotes[default or next(iter(remotes))].get("url", ""))
    missing = "://" not in url and not Path(url).exists()
    seen = f"{secrets.hide(url)}{' does not exist' * missing}"
    yield Finding("DVC remote", "problem" if missing else "ok", seen, "create or mount it" * missing)


def mlflow(settings: Params) -> Iterator[Finding]:
    uri = track.address(settings)
    name = secrets.hide(uri)
    try:
        if not uri.startswith("sqlite:///") or Path(uri.removeprefix("sqlite:///")).exists():
            connection.check_reachable(uri)
            if stale := schema_fault(uri):
                yield Finding("MLflow", "problem", f"{name}: {stale}", f"back it up, then mlflow db upgrade {name}")
                return
        yield Finding("MLflow", "ok", name)
    except Exception as e:  # of the network, a driver or the database
        fault = (str(e).splitlines() or [""])[0][:120]
        yield Finding("MLflow", "problem", f"{name}: {type(e).__name__}: {secrets.hide(fault)}", "start it, or set track.uri")


def results(settings: Params) -> Iterator[Finding]:
    """Slow first tokens, slow decoding and lost quality in the last results."""
    here = {n: records.read(p, records.VariantResult) for n in settings.variants if (p := artifacts.metrics(n)).exists()}
    if not here:
        yield Finding("results", "note", "none yet", "make repro")
        return
    for name, result in here.items():
        yield from _slow(name, result)
    steps = sorted((n for n in here if n != settings.reference), key=lambda n: -_value(here[n]["metrics"], "bits_per_weight"))
    verdict = records.read(artifacts.GATE, records.Verdict)["variants"] if artifacts.GATE.exists() else {}
    fails = (n for n in steps if n in verdict and verdict[n]["verdict"] == "FAIL")
    if first := next((n for n in fails if (nominal_bits(here[n]["options"]) or 0) < 16), None):
        bits, kld = (_value(here[first]["metrics"], m) for m in ("bits_per_weight", "kld_mean"))
        seen = f"going down in bits, {first} is the first to FAIL ({bits:.3g} bits a weight, KLD {kld:.3g} nats)"
        advice = "see *where it broke* in the report; `keep` the layers that hurt; more calibration rows"
        yield Finding("quality", "note", seen, advice)
    elif steps:
        yield Finding("quality", "ok", "no variant with a verdict FAILs")


def _slow(name: str, result: records.VariantResult) -> Iterator[Finding]:
    warm, cold = (_value(result["metrics"], m) for m in ("ttft_ms", "ttft_cold_ms"))
    if cold > 3 * warm > 0:
        seen = f"{name}: first request {cold:.0f} ms, later ones {warm:.0f} ms"
        yield Finding("TTFT", "note", seen, "it is the cold start: send a warm-up request after loading")
    if artifacts.served(name).exists():
        levels = records.read(artifacts.served(name), records.ServerReport)["levels"]
        closed = {int(level.removeprefix("closed-")): m for level, m in levels.items() if level.startswith("closed-")}
        least, most = min(closed, default=0), max(closed, default=0)
        alone, many = (_value(closed.get(n, {}), "ttft_p50_ms") for n in (least, most))
        if many > 2 * alone > 0:
            seen = f"{name} behind its server: {alone:.0f} ms with {least} at once, {many:.0f} ms with {most}"
            yield Finding("TTFT", "note", seen, "requests wait for each other: fewer at once, or more machines")
    card = (result["machine"]["gpu"] if result["machine"] else None) or ""
    known, meta = next((gb for part, gb in KNOWN.items() if part in card), None), artifacts.meta_of(artifacts.timings(name))
    measured = artifacts.read_json(meta).get("memory_bandwidth") if known and meta.exists() else None
    if known and measured and measured / 1e9 < SLOW * known:
        seen = f"{card} reads {measured / 1e9:.0f} GB/s of {known}"
        yield Finding("decode", "problem", seen, "look at nvidia-smi: clocks, power limit, MIG, other processes")


def _value(metrics: records.Metrics, name: str) -> float:
    metric = metrics.get(name)
    return float(metric["value"] or 0) if metric else 0.0


CHECKS: tuple[Callable[[Params], Iterator[Finding]], ...] = (
    torch_and_card, processor, builds, room, hub, ports, clocks, version_control, remote, mlflow, results,
)  # fmt: skip


def findings(settings: Params) -> Iterator[Finding]:
    """All findings; a check that cannot look gives a note."""
    for check in CHECKS:
        try:
            yield from check(settings)
        except (OSError, ImportError, QuantgateError, subprocess.SubprocessError) as e:
            yield Finding(check.__name__.replace("_", " "), "note", f"could not look: {e}")


def main(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Check machine, packages, network, git, DVC and MLflow; say what to do. Exits 1 if there is a problem."""
    seen = list(findings(params.load()))
    problems = sum(f.state == "problem" for f in seen)
    if as_json:
        print(json.dumps([f._asdict() for f in seen], indent=2))
    else:
        for f in sorted(seen, key=lambda f: ("problem", "note", "ok").index(f.state)):
            print(f"{f.state:<8} {f.about}: {f.seen}" + (f"\n{'':<8} -> {f.do}" if f.do else ""))
        print(f"\n{problems} problems, {sum(f.state == 'note' for f in seen)} notes")
    raise typer.Exit(1 if problems else 0)
