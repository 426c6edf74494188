"""A node's work: no other account of its machine can take it."""

import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from types import SimpleNamespace

import httpx
import pytest
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.interceptors.http.superexec_auth import SuperExecAuthHttpInterceptor
from flwr.supercore.runtime import RuntimeHttpClient

from consilience.flower.deployment import executor
from consilience.flower.loopback import free_port, tool

ECHO = """#!/bin/sh
while [ $# -gt 0 ]; do
  echo "$1"
  if [ "$1" = --token-file ]; then cat "$2" && echo; fi
  shift
done
"""


def listens(port):
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True


def test_a_process_without_the_secret_gets_no_task(tmp_path):
    port = free_port()
    command = [tool("consilience"), "flower", "node", "--insecure", "--superlink", "127.0.0.1:1", "--port", str(port)]
    env = {**os.environ, "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}", "FLWR_HOME": str(tmp_path)}
    with open(tmp_path / "log", "wb") as log, subprocess.Popen(command, env=env, stdout=log, stderr=log) as node:
        try:
            ask = AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP])

            def acquire(*proof):
                with RuntimeHttpClient.from_server_address(f"127.0.0.1:{port}", True, None, proof) as client:
                    return client.AcquireTask(ask)

            end = time.monotonic() + 60
            while not listens(port):
                assert time.monotonic() < end, (tmp_path / "log").read_text()
                time.sleep(0.2)
            with pytest.raises(httpx.HTTPStatusError, match="401"):
                acquire()
            secret = tmp_path / f"node-{port}.secret"
            assert oct(secret.stat().st_mode)[-3:] == "600"
            methods = {"/flwr.proto.Runtime/AcquireTask"}
            proof = SuperExecAuthHttpInterceptor(master_secret=secret.read_bytes(), protected_methods=methods)
            assert not acquire(proof).HasField("task")
        finally:
            node.terminate()
            node.wait(30)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # nobody waits for the process
def test_a_tasks_token_is_not_among_the_arguments_of_its_process(tmp_path, monkeypatch, capfd):
    (tmp_path / "app").write_text(ECHO)
    (tmp_path / "app").chmod(0o755)
    monkeypatch.setitem(executor.TASK_TYPE_TO_COMMAND, TaskType.CLIENT_APP, str(tmp_path / "app"))
    spec = SimpleNamespace(
        task_type=TaskType.CLIENT_APP, runtime_api_address="127.0.0.1:1", token="the-token", parent_pid=7
    )
    assert executor.PrivateExecutor().launch(spec)
    end, words = time.monotonic() + 20, []
    while "--insecure" not in words:
        assert time.monotonic() < end
        time.sleep(0.05)
        words += capfd.readouterr().out.split()
    at = words.index("--token-file")
    assert words[at + 1] == "the-token"
    assert words[at + 2].startswith("/dev/fd/")
    assert words.count("the-token") == 1
