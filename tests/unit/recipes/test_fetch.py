"""Data sets are found where they should be, and downloaded once, whole or not at all."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from keepstep.data.fetch import FileSet, locate, whole_file
from keepstep.errors import DataError

CONTENT = {"a.bin": b"first file" * 1000, "b.bin": b"second"}
MD5: dict[str, str | None] = {name: hashlib.md5(content).hexdigest() for name, content in CONTENT.items()}
PRIVATE = FileSet(dict.fromkeys(CONTENT))


class Server:
    """Serves CONTENT on the loopback, after a delay, and keeps the paths it was asked for."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.delay_s = 0.0
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.requests.append(self.path)
                time.sleep(server.delay_s)
                content = CONTENT.get(self.path.removeprefix("/set/"))
                self.send_response(200 if content else 404)
                self.end_headers()
                self.wfile.write(content or b"")

            def log_message(self, *args: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/set"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = Server()
    thread = threading.Thread(target=server.http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.http.shutdown()
    thread.join()
    server.http.server_close()


def fill(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names or CONTENT:
        (folder / name).write_bytes(CONTENT[name])
    return folder


@pytest.mark.parametrize("below", ["", "set"])
def test_explicit_folder_or_its_subfolder(tmp_path: Path, cache: Path, below: str) -> None:
    folder = fill(tmp_path / "here" / below)
    assert locate("set", PRIVATE, data=tmp_path / "here").folder == folder


def test_explicit_folder_wins_over_environment_and_cache(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(cache / "set")
    assert locate("set", PRIVATE).folder == cache / "set"
    monkeypatch.setenv("KEEPSTEP_DATA", str(fill(tmp_path / "environment")))
    assert locate("set", PRIVATE).folder == tmp_path / "environment"
    assert locate("set", PRIVATE, data=str(fill(tmp_path / "here"))).folder == tmp_path / "here"


def test_explicit_folder_without_the_files_never_downloads(tmp_path: Path, cache: Path, server: Server) -> None:
    fill(cache / "set")
    folder = fill(tmp_path / "here", "a.bin")
    with pytest.raises(DataError) as caught:
        locate("set", PRIVATE, FileSet(MD5, urls=(server.url,)), data=folder)
    assert server.requests == []
    for part in ("set", "a.bin", "b.bin", str(folder), str(folder / "set"), "KEEPSTEP_DATA"):
        assert part in str(caught.value)


def test_environment_without_the_files_falls_through(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(cache / "set")
    monkeypatch.setenv("KEEPSTEP_DATA", str(tmp_path / "nothing"))
    assert locate("set", PRIVATE).folder == cache / "set"


def test_says_which_form_was_found(tmp_path: Path, cache: Path) -> None:
    first, second = FileSet({"a.bin": None}), FileSet({"b.bin": None})
    assert locate("set", first, second, data=fill(tmp_path / "second", "b.bin")).form is second
    assert locate("set", first, second, data=fill(tmp_path / "both")).form is first


def test_not_public_and_not_there(cache: Path) -> None:
    with pytest.raises(DataError, match=r"a\.bin, b\.bin.*not public.*KEEPSTEP_DATA"):
        locate("set", PRIVATE)


def test_downloads_what_is_missing_once(cache: Path, server: Server) -> None:
    fill(cache / "set", "b.bin")
    (cache / "set" / "a.bin.part").write_bytes(b"left by a process that was killed")
    public = FileSet(MD5, urls=(server.url,))
    for _ in range(2):
        assert locate("set", PRIVATE, public).folder == cache / "set"
    assert server.requests == ["/set/a.bin"]
    assert sorted(path.name for path in (cache / "set").iterdir()) == [".lock", "a.bin", "b.bin"]
    assert (cache / "set" / "a.bin").read_bytes() == CONTENT["a.bin"]


def test_tries_the_next_address(cache: Path, server: Server) -> None:
    folder = locate("set", FileSet(MD5, urls=(f"{server.url}/nowhere/", f"{server.url}/"))).folder
    assert (folder / "b.bin").read_bytes() == CONTENT["b.bin"]


def test_wrong_md5_leaves_nothing(cache: Path, server: Server) -> None:
    with pytest.raises(DataError, match=rf"a\.bin: md5 is {MD5['a.bin']}, expected 0123"):
        locate("set", FileSet({"a.bin": "0123"}, urls=(server.url,)))
    assert [path.name for path in (cache / "set").iterdir()] == [".lock"]


def test_download_failure_is_one_clear_error(cache: Path, server: Server) -> None:
    closed = "http://127.0.0.1:1"
    with pytest.raises(DataError) as caught:
        locate("set", FileSet({"missing.bin": "0123"}, urls=(server.url, closed)))
    for part in (f"{server.url}/missing.bin: HTTP Error 404", f"{closed}/missing.bin: ", str(cache / "set")):
        assert part in str(caught.value)


def test_cache_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(fill(tmp_path, "a.bin") / "a.bin"))
    with pytest.raises(DataError, match="XDG_CACHE_HOME"):
        locate("set", FileSet(MD5, urls=("http://127.0.0.1:1",)))


def test_interrupted_write_keeps_the_old_file(tmp_path: Path) -> None:
    path = fill(tmp_path, "a.bin") / "a.bin"
    with pytest.raises(KeyboardInterrupt), whole_file(path) as file:
        file.write(b"half of")
        raise KeyboardInterrupt
    assert path.read_bytes() == CONTENT["a.bin"]
    assert list(tmp_path.iterdir()) == [path]


START_TOGETHER = """
import pathlib, sys, time
from keepstep.data.fetch import FileSet, locate
url, md5, mine, *others = sys.argv[1:]
pathlib.Path(mine).touch()
while not all(pathlib.Path(other).exists() for other in others):
    time.sleep(0.005)
print((locate("set", FileSet({"a.bin": md5}, urls=(url,))).folder / "a.bin").read_bytes() == b"first file" * 1000)
"""


def test_processes_that_start_at_once_download_once(tmp_path: Path, cache: Path, server: Server) -> None:
    server.delay_s = 0.3
    ready = [str(tmp_path / f"ready{i}") for i in range(3)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", START_TOGETHER, server.url, str(MD5["a.bin"]), mine, *ready],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for mine in ready
    ]
    assert [process.communicate(timeout=50)[0].strip() for process in processes] == ["True"] * 3
    assert server.requests == ["/set/a.bin"]
