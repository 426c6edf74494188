"""A federation on one machine: a SuperLink and SuperNodes as processes on free ports, to try an app before use."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

import tomli_w

from consilience.core.errors import ConsilienceError
from consilience.flower.deployment.certificates import certify, make_key, make_server_certificate

QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "PYTHONUNBUFFERED": "1"}
START_TIMEOUT = 60.0  # seconds
SUPERLINK, GATE = "superlink", "gate"  # the names of their processes and logs


class Loopback:
    """`with Loopback(folder) as federation:` starts a SuperLink; `node` adds a site, `run` runs an app to its end.

    All processes write to `folder` and end with the block. A `secure` federation has certificates and keys, and its
    sites connect to a gate; in others, messages are not encrypted."""

    def __init__(self, folder: Path, *, secure: bool = False) -> None:
        self.folder, self.secure = folder, secure
        self.port, self.gate_port = free_port(), free_port()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        self._home(SUPERLINK).mkdir(parents=True, exist_ok=True)
        trust = {"root-certificates": str(self.certificates / "ca.crt")} if self.secure else {"insecure": True}
        here = {"address": f"127.0.0.1:{self.port}", **trust}
        config = tomli_w.dumps({"superlink": {"default": "here", "here": here}})
        (self._home(SUPERLINK) / "config.toml").write_text(config)
        if self.secure:
            make_server_certificate(self.certificates)
        self.start_superlink()
        if self.secure:
            self._start(GATE, ["consilience", "flower", "gate", "--superlink", f"127.0.0.1:{self.port}", "--host",
                               "127.0.0.1", "--port", str(self.gate_port), "--certificates", str(self.certificates)],
                        self.gate_port)  # fmt: skip
        return self

    @property
    def certificates(self) -> Path:
        """The folder of the federation's certificates and the sites' keys."""
        return self.folder / "certificates"

    def __exit__(self, *_: object) -> None:
        for name in list(self._processes):
            self.kill(name)

    def start_superlink(self) -> None:
        secure = ["--insecure"]
        if self.secure:
            secure = [
                *("--ssl-ca-certfile", str(self.certificates / "ca.crt"), "--enable-supernode-auth"),
                *("--ssl-certfile", str(self.certificates / "server.crt")),
                *("--ssl-keyfile", str(self.certificates / "server.key")),
            ]
        self._start(SUPERLINK, ["flower-superlink", *secure, "--port", str(self.port), "--database", "superlink.db",
                             "--disable-runtime-dependency-installation"], self.port)  # fmt: skip

    def node(self, site: str, **settings: Any) -> None:
        """Start a SuperNode for this site, with these settings for its app."""
        words = " ".join(f"{key}={json.dumps(value)}" for key, value in {"site": site, **settings}.items())
        how = ["--insecure", "--superlink", f"127.0.0.1:{self.port}"]
        if self.secure:
            key = self.certificates / f"{site}.key"
            if not key.exists():
                public = make_key(key)
                certify(self.certificates, site, public)
                self._flwr("supernode", "register", str(public), "--name", site, "--format", "json")
            how = ["--superlink", f"127.0.0.1:{self.gate_port}", "--authority", str(self.certificates / "ca.crt"),
                   "--certificate", str(self.certificates / f"{site}.crt"), "--key", str(key)]  # fmt: skip
        self._start(site, ["consilience", "flower", "node", *how, "--port", str(free_port()), "--node-config", words])

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def kill(self, name: str) -> None:
        """Kill (-9) the SuperLink or a site, with all processes that it has started."""
        process = self._processes.pop(name)
        for one in (process.pid, *_offspring(process.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)
        process.wait()

    def start(self, app: Path, **config: Any) -> str:
        """Start an app with `flwr run` and return the run's number."""
        words = " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())
        found = self._flwr("run", str(app), "--format", "json", *(["--run-config", words] if words else []))
        return str(found["run-id"])

    def status(self, run: str) -> str:
        """A run's status: running, finished:completed, finished:failed, …"""
        return str(self._flwr("list", "--run-id", run, "--format", "json")["runs"][0]["status"])

    def run(self, app: Path, seconds: float = 600.0, **config: Any) -> str:
        """Start an app, wait for its end, and return its status."""
        return self.wait(self.start(app, **config), seconds)

    def wait(self, run: str, seconds: float = 600.0) -> str:
        """Wait for the end of a run and return its status. The server's output is in the log `run-RUN`."""
        with open(self.log(f"run-{run}"), "ab") as log:
            stream = [tool("flwr"), "log", run, "--stream"]
            try:
                subprocess.run(
                    stream, stdout=log, stderr=subprocess.STDOUT, env=self._environment(), cwd=self.folder,
                    timeout=seconds,
                )  # fmt: skip
            except subprocess.TimeoutExpired as error:
                where = self.log(f"run-{run}")
                raise ConsilienceError(f"the run has not ended within {seconds:g} seconds: see {where}") from error
        return self.status(run)

    def _start(self, name: str, command: list[str], port: int | None = None) -> None:
        """Start a process, and wait until it listens at `port`."""
        with open(self.log(name), "ab") as log:
            self._processes[name] = subprocess.Popen(
                [tool(command[0]), *command[1:]], stdout=log, stderr=subprocess.STDOUT, env=self._environment(name),
                cwd=self.folder, start_new_session=True,
            )  # fmt: skip
        end = time.monotonic() + START_TIMEOUT
        while port is not None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                return
            if time.monotonic() > end or self._processes[name].poll() is not None:
                raise ConsilienceError(f"the {name} did not start: see {self.log(name)}")
            time.sleep(0.1)

    def _flwr(self, *arguments: str) -> dict[str, Any]:
        done = subprocess.run(
            [tool("flwr"), *arguments], capture_output=True, text=True, env=self._environment(), cwd=self.folder
        )
        try:
            found: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])
        except ValueError as error:
            raise ConsilienceError(f"flwr {arguments[0]} failed: {done.stdout}{done.stderr}") from error
        if not found.get("success", True):
            raise ConsilienceError(f"flwr {arguments[0]} failed: {found}")
        return found

    def _home(self, name: str) -> Path:
        """The folder of Flower's own files, one for each process, as on separate machines."""
        return self.folder / "flwr" / name

    def _environment(self, name: str = SUPERLINK) -> dict[str, str]:
        # Flower's commands start others by name; they must find those of this environment.
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        return {**os.environ, **QUIET, "PATH": path, "FLWR_HOME": str(self._home(name))}


def _offspring(pid: int) -> list[int]:
    found = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(word) for word in file.read_text().split()]
    return [*found, *(deeper for child in found for deeper in _offspring(child))]


def free_port() -> int:
    """A port of this machine that nobody uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def tool(name: str) -> str:
    """The path of a command in this Python environment, or the first on the PATH."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise ConsilienceError(f"the command {name} is missing: pip install 'consilience[flower]'")
    return found
