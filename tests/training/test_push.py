"""``proxykv push``, against a server on loopback that answers as the Hub does."""

from __future__ import annotations

import base64
import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import huggingface_hub
import pytest
from tiny import tiny_model
from tiny_mappers import make_mapper

from proxykv_hf import InvalidInputError, cli
from proxykv_hf.proxy.card import mapper_card

REPO = "someone/tiny"


class Hub(ThreadingHTTPServer):
    """Keeps what it is sent; takes nothing while ``refuses``."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answer)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.repos, self.files, self.summaries, self.refuses = {}, {}, [], False


class Answer(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self._body()
        path, hub = self.path, self.server
        if hub.refuses:
            return self._send({"error": "who are you?"}, 401)
        if path == "/api/repos/create":
            sent = json.loads(body)
            hub.repos[f"{sent['organization']}/{sent['name']}"] = sent
            return self._send({"url": f"{hub.url}/{REPO}"})
        if path == "/api/validate-yaml":
            return self._send({"errors": [], "warnings": []})
        if path == f"/api/models/{REPO}/preupload/main":
            wanted = json.loads(body)["files"]
            modes = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in wanted]
            return self._send({"files": modes})
        assert path == f"/api/models/{REPO}/commit/main"
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "header":
                hub.summaries.append(line["value"]["summary"])
            else:
                hub.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        return self._send({"commitUrl": f"{hub.url}/{REPO}/commit/abc", "commitOid": "abc"})

    def do_GET(self):
        self._send({"error": "nothing here"}, 404)

    def _body(self):
        if "Content-Length" in self.headers:
            return self.rfile.read(int(self.headers["Content-Length"]))
        body = b""
        while size := int(self.rfile.readline(), 16):  # chunked
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _send(self, value, status=200):
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def hub(monkeypatch):
    server = Hub()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.url)
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def folder(tmp_path):
    """As ``proxykv train`` leaves it."""
    mapper = make_mapper(
        tiny_model(), tiny_model("qwen2", 1, layers=2).model, target_id="org/large", proxy_id="org/small"
    )
    mapper.save_pretrained(tmp_path)
    rows = {"this mapper": {"0.1": 0.5, "0.2": 0.6, "0.3": 0.7, "0.5": 0.8}}
    card = mapper_card(mapper, title="Tiny", folder="mappers/x", agreement=rows, held_out="3", limits="- None.")
    target = 'model = AutoModelForCausalLM.from_pretrained("org/large")\n'
    (tmp_path / "README.md").write_text(str(card).replace("cache = ", f"{target}cache = "))
    (tmp_path / "results.json").write_text("{}")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "optimizer.pt").write_bytes(b"large")
    (tmp_path / "notes.txt").write_text("mine")
    return tmp_path


def test_a_mapper_goes_to_the_hub_with_its_card(hub, folder, capsys):
    assert cli.main(["push", str(folder), "--repo", REPO, "--private"]) == 0
    assert capsys.readouterr().out == f"{hub.url}/{REPO}/commit/abc\n"
    assert len(hub.summaries) == 1
    assert {"private": True}.items() <= hub.repos[REPO].items() or hub.repos[REPO]["visibility"] == "private"
    assert sorted(hub.files) == ["README.md", "config.json", "model.safetensors", "results.json"]
    for name in ("config.json", "model.safetensors", "results.json"):
        assert hub.files[name] == (folder / name).read_bytes()
    card = (folder / "README.md").read_text()
    assert card.count('"mappers/x"') == card.count('from_pretrained("org/large")') == 1
    assert hub.files["README.md"].decode() == card.replace('"mappers/x"', f'"{REPO}"')


def test_what_is_not_whole_does_not_go(hub, folder, tmp_path, capsys):
    def refused(path, repo=REPO):
        assert cli.main(["push", str(path), "--repo", repo]) == 2
        return capsys.readouterr().err

    assert "expected a folder that holds a mapper" in refused(folder / "nowhere")
    assert "expected a folder or Hub id that holds a mapper" in refused(folder / "checkpoints")
    (folder / "README.md").rename(folder / "card.md")
    assert f"there is no {folder / 'README.md'}: `proxykv train` writes it" in refused(folder)
    (folder / "card.md").rename(folder / "README.md")
    assert "Repo id" in refused(folder, "a/b/c")
    assert hub.repos == {}
    hub.refuses = True
    assert f"could not upload {folder} to {hub.url} as {REPO}: " in refused(folder)
    assert hub.files == {}


def test_a_hub_that_is_not_there(folder, monkeypatch, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", url)
    assert cli.main(["push", str(folder), "--repo", REPO]) == 2
    assert f"proxykv: could not upload {folder} to {url} as {REPO}: " in capsys.readouterr().err


def test_a_mapper_alone_is_not_published(hub, tmp_path):
    mapper = make_mapper(tiny_model(), tiny_model("qwen2", 1, layers=2).model)
    with pytest.raises(InvalidInputError, match="run `proxykv push FOLDER --repo ID`"):
        mapper.push_to_hub(REPO)
    with pytest.raises(InvalidInputError, match="run `proxykv push FOLDER --repo ID`"):
        mapper.save_pretrained(tmp_path / "folder", push_to_hub=True, repo_id=REPO)
    assert hub.repos == {}
    assert not (tmp_path / "folder").exists()
