"""Runs a node's app in a new process for every message, as flower-superexec does. It is a script, which imports Flower
and nothing else."""

import importlib
import subprocess
import tempfile

from flwr.supercore.cli.flower_superexec import flower_superexec
from flwr.supercore.constant import TASK_TYPE_TO_APPIO_API_ADDRESS_ARG, TASK_TYPE_TO_COMMAND
from flwr.supercore.superexec.executor.subprocess_executor import SubprocessExecutor
from flwr.supercore.superexec.executor.types import ExecutionSpec, LaunchResult


class PrivateExecutor(SubprocessExecutor):
    """Hands the token of a task over in an open file: every account can read the arguments of a process."""

    def launch(self, spec: ExecutionSpec) -> LaunchResult:
        address = [TASK_TYPE_TO_APPIO_API_ADDRESS_ARG[spec.task_type], spec.runtime_api_address]
        parent = [] if spec.parent_pid is None else ["--parent-pid", str(spec.parent_pid)]
        with tempfile.TemporaryFile() as file:
            file.write(spec.token.encode())
            file.seek(0)
            token = ["--token-file", f"/dev/fd/{file.fileno()}"]
            subprocess.Popen(
                [TASK_TYPE_TO_COMMAND[spec.task_type], *address, *token, *parent, "--insecure"],
                pass_fds=[file.fileno()],
            )
        return LaunchResult.accepted()


def main() -> None:
    """Run flower-superexec with a `PrivateExecutor`."""
    module = importlib.import_module("flwr.supercore.superexec.run_superexec")
    module.get_executor = lambda *_, **__: PrivateExecutor()  # type: ignore[attr-defined]
    flower_superexec()


if __name__ == "__main__":
    main()
