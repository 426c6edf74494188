"""Attacks on a deployment: strangers at the gate, other accounts at a site, two servers, careless registrations.

All of it happens on this machine. Connections, bytes and seconds are bounded.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from attacking import Outcome, attack

REPOSITORY = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
RUN_GATE = "import sys; from pathlib import Path; from consilience.flower.deployment.gate import run_gate; "
RUN_GATE += "run_gate(sys.argv[1], '127.0.0.1', int(sys.argv[2]), Path(sys.argv[3]))"
PATH = "/v1/fleet/pull-messages"


def certificates_module():
    """The functions that make certificates, of this checkout, whatever version is attacked."""
    file = REPOSITORY / "src" / "consilience" / "flower" / "deployment" / "certificates.py"
    spec = importlib.util.spec_from_file_location("certificates_of_attacks", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for_port(port: int, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        if time.monotonic() > end:
            raise TimeoutError(f"nothing listens at port {port}")
        time.sleep(0.1)


def environment(**more: str) -> dict[str, str]:
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    return {**os.environ, **quiet, "PATH": f"{BIN}:{os.environ['PATH']}", **more}


def end(process: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@dataclass
class Scene:
    """A gate in its own process, before a SuperLink that reads every request and says yes, and one honest site."""

    folder: Path
    port: int
    gate: subprocess.Popen
    header: str
    received: list[int] = field(default_factory=list)  # bytes of every request that reached the SuperLink

    def tls(self, honest: bool) -> ssl.SSLContext:
        tls = ssl.create_default_context(cafile=str(self.folder / "ca.crt"))
        if honest:
            tls.load_cert_chain(self.folder / "north.crt", self.folder / "north.pem")
        return tls

    def connect(self, honest: bool = False) -> ssl.SSLSocket:
        plain = socket.create_connection(("127.0.0.1", self.port), timeout=10)
        return self.tls(honest).wrap_socket(plain, server_hostname="localhost")

    def head(self, length: int, extra: str = "") -> bytes:
        lines = [f"POST {PATH} HTTP/1.1", "host: gate", f"flwr-public-key: {self.header}", f"content-length: {length}"]
        return ("\r\n".join(lines) + "\r\n" + extra + "\r\n").encode()

    def memory(self, kind: str = "VmHWM") -> float:
        """The gate's memory in MB, the largest so far or (VmRSS) now."""
        lines = Path(f"/proc/{self.gate.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1000 for line in lines if line.startswith(kind))

    def exchanges(self, count: int) -> tuple[int, float]:
        """(exchanges of the honest site that succeed, of `count`; the slowest in seconds), each on a new connection."""
        done, slowest = 0, 0.0
        for _ in range(count):
            start = time.monotonic()
            with contextlib.suppress(OSError), self.connect(honest=True) as site:
                site.sendall(self.head(4) + b"body")
                done += b" 200 " in site.recv(4096)
            slowest = max(slowest, time.monotonic() - start)
        return done, slowest


@contextlib.contextmanager
def scene() -> Iterator[Scene]:
    import uvicorn
    from cryptography.hazmat.primitives import serialization

    made = certificates_module()
    with tempfile.TemporaryDirectory() as name:
        folder, link, port = Path(name), free_port(), free_port()
        made.make_server_certificate(folder)
        made.certify(folder, "north", made.make_key(folder / "north.key"))
        private = serialization.load_ssh_private_key((folder / "north.key").read_bytes(), None)
        pem = serialization.Encoding.PEM
        plain = serialization.NoEncryption()
        (folder / "north.pem").write_bytes(private.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
        public = private.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
        received: list[int] = []

        async def superlink(scope, receive, send):
            if scope["type"] != "http":
                return
            size, more = 0, True
            while more:
                message = await receive()
                size, more = size + len(message.get("body", b"")), message.get("more_body", False)
            received.append(size)
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
            await send({"type": "http.response.body", "body": b"ok"})

        config = uvicorn.Config(
            superlink, port=link, log_level="error", ssl_certfile=str(folder / "server.crt"),
            ssl_keyfile=str(folder / "server.key"), lifespan="off",
        )  # fmt: skip
        server = uvicorn.Server(config)
        threading.Thread(target=server.run, daemon=True).start()
        with open(folder / "gate.log", "wb") as log:
            gate = subprocess.Popen(
                [sys.executable, "-c", f"import resource; resource.setrlimit(7, (1024, 1024)); {RUN_GATE}",
                 f"127.0.0.1:{link}", str(port), str(folder)],
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        try:
            wait_for_port(link)
            wait_for_port(port)
            yield Scene(folder, port, gate, b64encode(public).decode(), received)
        finally:
            end(gate)
            server.should_exit = True


@attack("A stranger sends a request")
def stranger() -> Outcome:
    with scene() as here:
        with contextlib.suppress(OSError), here.connect() as one:
            one.sendall(here.head(4) + b"body")
            one.recv(4096)
        reached = len(here.received)
        return Outcome("it reached the SuperLink" if reached else "the TLS handshake ended it", not reached)


@attack("20 strangers send all but the last byte of 64 MB")
def large_bodies() -> Outcome:
    size = 64 << 20
    with scene() as here:
        before = here.memory()

        def send() -> None:
            with contextlib.suppress(OSError), here.connect() as one:
                one.sendall(here.head(size))
                block = bytes(1 << 20)
                for _ in range(63):
                    one.sendall(block)
                one.sendall(block[:-1])
                time.sleep(5)

        threads = [threading.Thread(target=send, daemon=True) for _ in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        grown = here.memory() - before
        return Outcome(f"the gate's memory grew by {grown:.0f} MB", grown < 50)


@attack("A site with a certificate sends 16 times all but the last byte of 64 MB")
def large_bodies_of_a_site() -> Outcome:
    with scene() as here:
        before, sent = here.memory(), []

        def send() -> None:
            total = 0
            with contextlib.suppress(OSError), here.connect(honest=True) as one:
                one.sendall(here.head(0).replace(b"content-length: 0", b"transfer-encoding: chunked"))
                block = b"%x\r\n%s\r\n" % (1 << 20, bytes(1 << 20))
                for _ in range(63):
                    one.sendall(block)
                    total += 1 << 20
                time.sleep(5)
            sent.append(total)

        threads = [threading.Thread(target=send, daemon=True) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        grown, most = here.memory() - before, max(sent) / 1e6
        return Outcome(
            f"up to {most:.0f} MB were taken from each; the gate's memory grew by {grown:.0f} MB", grown < 50
        )


def idle(count: int) -> Outcome:
    with scene() as here:
        held = []
        with contextlib.suppress(OSError):
            for _ in range(count):
                held.append(socket.create_connection(("127.0.0.1", here.port), timeout=2))
        done, slowest = here.exchanges(10)
        return Outcome(
            f"{len(held)} connections; {done} of 10 exchanges of a site succeed, the slowest in {slowest:.1f} s",
            done == 10,
        )


@attack("300 idle connections, then a site exchanges messages")
def some_idle() -> Outcome:
    return idle(300)


@attack("1,100 idle connections to a gate with 1,024 file descriptors, then a site exchanges messages")
def many_idle() -> Outcome:
    return idle(1100)


@attack("20 strangers open connections without a pause for 10 s while a site exchanges messages")
def flood() -> Outcome:
    with scene() as here:
        stop, opened = time.monotonic() + 10, []

        def knock() -> None:
            held, count = [], 0
            while time.monotonic() < stop:
                with contextlib.suppress(OSError):
                    held.append(socket.create_connection(("127.0.0.1", here.port), timeout=1))
                    count += 1
                held = held[-50:]
                time.sleep(0.01)
            opened.append(count)

        threads = [threading.Thread(target=knock, daemon=True) for _ in range(20)]
        for thread in threads:
            thread.start()
        time.sleep(2)
        done, slowest = here.exchanges(10)
        for thread in threads:
            thread.join()
        return Outcome(
            f"{sum(opened)} connections; {done} of 10 exchanges succeed, the slowest in {slowest:.1f} s", done >= 9
        )


@attack("A site with a certificate sends a header of 1 MB")
def large_header() -> Outcome:
    with scene() as here:
        answer = b""
        with contextlib.suppress(OSError), here.connect(honest=True) as one:
            one.sendall(here.head(4, f"x-much: {'0' * (1 << 20)}\r\n") + b"body")
            answer = one.recv(4096)
        status = answer.split(b" ")[1].decode() if b" " in answer else "none, the connection was ended"
        return Outcome(f"reached the SuperLink: {bool(here.received)}; status {status}", not here.received)


@attack("A site with a certificate sends one byte of a header a second")
def drip() -> Outcome:
    with scene() as here:
        start = time.monotonic()
        with contextlib.suppress(OSError), here.connect(honest=True) as one:
            one.sendall(here.head(4)[:-2] + b"x-slow: ")
            one.settimeout(1.0)
            while time.monotonic() - start < 45:
                one.sendall(b"0")
                with contextlib.suppress(TimeoutError):
                    if not one.recv(1):
                        break
        seconds = time.monotonic() - start
        ended = "the gate ended it" if seconds < 44 else "it was still open"
        return Outcome(f"{ended} after {seconds:.0f} s", seconds < 44)


@attack("A registered site signs with its key, but uses another site's connection")
def other_key() -> Outcome:
    with scene() as here:
        with contextlib.suppress(OSError), here.connect(honest=True) as one:
            one.sendall(here.head(4).replace(here.header[:40].encode(), b"A" * 40) + b"body")
            one.recv(4096)
        reached = bool(here.received)
        return Outcome(
            "it reached the SuperLink" if reached else "refused: not the key of the certificate", not reached
        )


def in_memory():
    """The tests' federation in memory."""
    sys.path.insert(0, str(REPOSITORY / "tests"))
    from support import flower_grid

    logging.disable(logging.CRITICAL)
    return flower_grid


@attack("run.sh twice: a second server starts on a new run's directory, and then the run is resumed")
def second_server() -> Outcome:
    support = in_memory()
    from consilience.core.errors import ConsilienceError
    from consilience.flower import app as flower_app

    lock = (
        "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.lockf(file, fcntl.LOCK_EX); print(flush=True); input()"
    )
    with tempfile.TemporaryDirectory() as name, support.unhurried():
        world = support.World.linear(support.FEDEP, Path(name))
        read, began = flower_app.Registry.read, []
        world.serve(1)
        before = (world.out / "sites.json").read_bytes()
        command = [sys.executable, "-c", lock, str(world.out / ".lock")]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
            first.stdout.readline()
            # The second server looked before the first had written its list of sites.
            flower_app.Registry.read = classmethod(lambda cls, folder: None)
            with contextlib.suppress(ConsilienceError):
                world.serve(2)
            flower_app.Registry.read = read
            first.communicate(b"\n")
        began.append((world.out / "sites.json").read_bytes() == before)
        lost = 0
        with contextlib.suppress(ConsilienceError):
            logging.disable(logging.NOTSET)
            messages: list[str] = []
            handler = logging.Handler()
            handler.emit = lambda record: messages.append(record.getMessage())
            logging.getLogger("consilience").addHandler(handler)
            world.serve(2)
            lost = sum("lost" in message for message in messages)
        text = "the list of sites is unchanged" if began[0] else "the loser replaced the list of sites"
        return Outcome(f"{text}; states of {lost} of {len(world.names)} sites lost", began[0] and not lost)


@attack("A key that is registered without a name acts as the site Basel")
def nameless() -> Outcome:
    support = in_memory()
    from flwr.app import Message

    from consilience.flower import Participation
    from consilience.flower.coordinator import Coordinator
    from consilience.flower.messages import encode

    grid = support.MemoryGrid()
    grid._insecure = False
    grid.start(lambda message, context: Message(encode(support.site_info("Basel")), reply_to=message))
    coordinator = Coordinator(grid, Participation(1), "f", clock=grid.clock, sleep=grid.sleep)
    taken = coordinator.available(["Basel"]) == ["Basel"]
    return Outcome("the server believes it" if taken else "refused", not taken)


@attack("One of four sites has examples of another shape, and three are enough")
def odd_shape() -> Outcome:
    support = in_memory()
    from flwr.app import Message

    from consilience.core.errors import ConsilienceError
    from consilience.flower import Participation
    from consilience.flower.coordinator import Coordinator
    from consilience.flower.messages import encode
    from consilience.flower.registry import Registry

    grid = support.MemoryGrid()
    for name, width in (("Aarau", 4), ("Basel", 3), ("Bern", 3), ("Chur", 3)):
        info = support.site_info(name, x=("float32", [width]))
        grid.start(lambda message, context, info=info: Message(encode(info), reply_to=message))
    coordinator = Coordinator(grid, Participation(3, patience=100), "f", clock=grid.clock, sleep=grid.sleep)
    try:
        names = Registry.of(coordinator.gather(3)).names
    except ConsilienceError as error:
        named = str(error).split(" at ", 1)[1].split(",")[0]
        return Outcome(f"the start ends; the odd site is Aarau, the error names {named}", False)
    return Outcome(f"the run begins with {', '.join(names)}", names == ("Basel", "Bern", "Chur"))


@attack("Another account at a site asks the node's port for work")
def local_account() -> Outcome:
    import httpx
    from flwr.proto.runtime_pb2 import AcquireTaskRequest
    from flwr.supercore.constant import TaskType
    from flwr.supercore.runtime import RuntimeHttpClient

    from consilience.flower import deployment

    new = Path(deployment.__file__).with_name("node.py").exists()
    command = [BIN / "consilience", "flower", "node"] if new else [BIN / "flower-supernode"]
    port = free_port()
    with tempfile.TemporaryDirectory() as home, open(Path(home, "log"), "wb") as log:
        node = subprocess.Popen(
            [*command, "--insecure", "--superlink", "127.0.0.1:1", "--port", str(port)],
            stdout=log, stderr=log, env=environment(FLWR_HOME=home), start_new_session=True,
        )  # fmt: skip
        try:
            wait_for_port(port)
            with RuntimeHttpClient.from_server_address(f"127.0.0.1:{port}", True, None, ()) as client:
                client.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP]))
            return Outcome("the node accepts the request; no task was waiting", False)
        except httpx.HTTPStatusError as error:
            return Outcome(f"refused with status {error.response.status_code}", True)
        finally:
            end(node)


FLWR = """#!/bin/sh
echo "$*" >>"$0.calls"
case "$*" in
  "run "*--stream*) sleep 30 ;;
  "run "*) echo '{"success": true, "run-id": "123"}' ;;
  "log "*) sleep 30 ;;
esac
"""


@contextlib.contextmanager
def app_with_programs(**programs: str) -> Iterator[tuple[Path, Path, dict[str, str]]]:
    """(a new app, the folder of these programs, the environment that finds them)."""
    from consilience.config import read_config
    from consilience.flower.deployment.create import write_app

    with tempfile.TemporaryDirectory() as name:
        app, folder = Path(name, "silos"), Path(name, "bin")
        folder.mkdir()
        write_app(app, read_config(REPOSITORY / "examples" / "silos.toml"))
        for program, text in programs.items():
            file = folder / program.replace("_", "-")
            file.write_text(text)
            file.chmod(0o755)
        yield app, folder, {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}


@attack("Ctrl-C in run.sh")
def interrupted() -> Outcome:
    with app_with_programs(flwr=FLWR) as (app, programs, env):
        calls = programs / "flwr.calls"
        run = subprocess.Popen([app / "run.sh"], env=env, start_new_session=True, stderr=subprocess.DEVNULL)
        limit = time.monotonic() + 20
        while time.monotonic() < limit and not (
            calls.exists() and ("log " in calls.read_text() or "--stream" in calls.read_text())
        ):
            time.sleep(0.1)
        time.sleep(0.5)
        os.killpg(run.pid, signal.SIGINT)
        run.wait(20)
        stopped = "stop 123" in calls.read_text()
        return Outcome("the run is stopped" if stopped else "only the log ends; the run goes on", stopped)


@attack("Another account reads the link's database")
def modes() -> Outcome:
    link = '#!/bin/sh\n: >"$FLWR_HOME/superlink.db"\n'
    with app_with_programs(flower_superlink=link) as (app, _, env):
        before = os.umask(0o022)
        try:
            subprocess.run([app / "superlink.sh"], env=env, check=True)
        finally:
            os.umask(before)
        database = app / ".flwr" / "server" / "superlink.db"
        mode = oct(database.stat().st_mode)[-3:]
        return Outcome(f"mode {mode}", mode == "600")


@attack("A node with a key is killed and started again at once")
def killed_node() -> Outcome:
    from consilience.flower import deployment

    new = Path(deployment.__file__).with_name("node.py").exists()
    made = certificates_module()
    with tempfile.TemporaryDirectory() as name:
        folder, link = Path(name), free_port()
        made.make_server_certificate(folder)
        public = made.make_key(folder / "north.key")
        made.certify(folder, "north", public)
        home = environment(FLWR_HOME=name)
        (folder / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{link}"\n'
            f'root-certificates = "{folder / "ca.crt"}"\n'
        )
        log = open(folder / "log", "ab")  # noqa: SIM115
        options = {"env": home, "stdout": log, "stderr": log, "start_new_session": True, "cwd": folder}
        superlink = subprocess.Popen([
            BIN / "flower-superlink", "--host", "127.0.0.1", "--port", str(link), "--enable-supernode-auth",
            "--ssl-ca-certfile", folder / "ca.crt", "--ssl-certfile", folder / "server.crt", "--ssl-keyfile",
            folder / "server.key", "--database", folder / "link.db",
        ], **options)  # fmt: skip
        wait_for_port(link)
        subprocess.run([BIN / "flwr", "supernode", "register", public, "--name", "north"], check=True, **options)
        key = ["--authority", folder / "ca.crt", "--certificate", folder / "north.crt", "--key", folder / "north.key"]
        old = ["--root-certificates", folder / "ca.crt", "--auth-supernode-private-key", folder / "north.key"]
        command = [BIN / "consilience", "flower", "node", *key] if new else [BIN / "flower-supernode", *old]
        command += ["--superlink", f"127.0.0.1:{link}", "--port"]

        def activated() -> int:
            return (folder / "log").read_text(errors="replace").count("Activated node_id")

        def started() -> subprocess.Popen:
            return subprocess.Popen([*command, str(free_port())], **options)

        node = started()
        try:
            limit = time.monotonic() + 40
            while activated() < 1 and time.monotonic() < limit:
                time.sleep(0.2)
            end(node)
            node, start = started(), time.monotonic()
            while activated() < 2 and node.poll() is None and time.monotonic() - start < 90:
                time.sleep(0.2)
            seconds = time.monotonic() - start
            if activated() == 2:
                return Outcome(f"it is back after {seconds:.0f} s", True)
            return Outcome(f"it is refused and ends after {seconds:.0f} s", False)
        finally:
            end(node)
            end(superlink)
            log.close()
