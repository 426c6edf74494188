"""Attacks by what lies on the user's own machine: hung workers, names in a config, damaged configs and tables."""

from __future__ import annotations

import collections
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

from attacking import Outcome, attack

CONFIGS = int(os.environ.get("CONSILIENCE_CONFIGS", "500"))  # 10000 for the whole campaign
LONG = 20.0  # seconds after which a wait counts as endless


class _Late(BaseException):
    """Not an Exception, which a component may turn into a sentence."""


def _pool(harm, threads=1, seconds=LONG):
    """The outcome of a round with workers, one of which is harmed in its first request."""
    import torch

    from consilience.core.errors import ConsilienceError
    from consilience.engines import workers
    from consilience.engines.work import Share

    logging.disable(logging.CRITICAL)
    if hasattr(workers, "PATIENCE"):
        workers.PATIENCE, workers.LOOK = 40, 0.05
    mark = Path(tempfile.mkdtemp()) / "done"

    def group(ids, message, states, round, limit):
        try:
            mark.touch(exist_ok=False)
            harm()
        except FileExistsError:
            pass
        return Share(update=ids.sum() + message.exp().sum(), accepted=ids.tolist())

    def late():
        _leave(Outcome(f"the round waited for the worker, still after {seconds:g} s", False))

    watch = threading.Timer(seconds, late)
    watch.daemon = True
    watch.start()
    start, pool = time.perf_counter(), workers.Pool(2, threads, group)
    try:
        share = pool.run(torch.arange(6), torch.zeros(1000, 1000), None, 1, True)
        said = f"all {len(share.accepted)} clients computed"
    except ConsilienceError as error:
        said = f"the run ended: {error}"
    watch.cancel()
    return Outcome(f"{said} after {time.perf_counter() - start:.1f} s", True)


def _leave(outcome):
    """Print the outcome and end this process and its workers, which may not end themselves."""
    import multiprocessing

    print(f"outcome\t{outcome.withstood}\t{outcome.text}", flush=True)
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(0)


@attack("a worker is killed (SIGKILL) in a round")
def killed():
    return _pool(lambda: os.kill(os.getpid(), signal.SIGKILL))


@attack("a worker is stopped (SIGSTOP) in a round")
def stopped():
    return _pool(lambda: os.kill(os.getpid(), signal.SIGSTOP))


@attack("a worker waits for a lock that no thread holds")
def deadlocked():
    lock = threading.Lock()
    lock.acquire()
    return _pool(lock.acquire)


@attack("workers of two threads, forked after OpenMP's threads have started")
def openmp():
    import torch

    torch.set_num_threads(2)
    torch.zeros(1000, 1000).exp()
    return _pool(lambda: None, threads=2)


@attack("a worker compiles, forked after the compiler's threads have started")
def compiler():
    import torch

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()
    from torch._inductor.async_compile import AsyncCompile

    if torch._inductor.config.compile_threads > 1:
        AsyncCompile.submit(int).result()  # what a compilation does first
    return _pool(lambda: torch.compile(lambda x: x.sin() + 1)(torch.zeros(10)), seconds=90.0)


@attack('`name = "os:system"` in a config, and 11 other callables of the wrong kind')
def shell():
    import tomli_w

    from consilience.config import read_config
    from consilience.core.errors import ConsilienceError

    folder = Path(tempfile.mkdtemp())
    os.chdir(folder)
    (folder / "own.py").write_text(
        "import functools, subprocess\nfrom os import system\n"
        "shell = functools.partial(system, 'touch harmed')\n"
        "def none(command: str = '') -> None: system('touch harmed')\n"
    )
    base = {"data": {"name": "digits"}, "partition": {"name": "iid", "clients": 2}, "model": {"name": "logistic"}}
    base["run"] = {"rounds": 1}
    calls = [{"name": "os:system", "command": "touch harmed"}, {"name": "own.py:system", "command": "touch harmed"}]
    calls += [{"name": "own.py:shell"}, {"name": "own.py:none"}]
    harmed = refused = 0
    for section in ("data", "partition", "model"):
        for table in calls:
            (folder / "c.toml").write_text(tomli_w.dumps({**base, section: table}))
            try:
                read_config(folder / "c.toml").setting()
            except ConsilienceError:
                refused += 1
            harmed += (folder / "harmed").exists()
            (folder / "harmed").unlink(missing_ok=True)
    return Outcome(f"{harmed} of 12 were run, {refused} ended in a sentence", not harmed and refused == 12)


@attack("a CSV file with many columns")
def columns():
    import torch

    from consilience.data.loaders.silos import csv_silos

    torch.set_num_threads(1)
    seconds = {}
    for count in (4_000, 16_000):
        folder = Path(tempfile.mkdtemp())
        head = ",".join(f"c{i}" for i in range(count))
        rows = "".join(f"{','.join([f'{j}.5'] * count)},{j}\n" for j in range(2))
        (folder / "a.csv").write_text(f"{head},target\n{rows}")
        times = []
        for _ in range(5):
            start = time.process_time()
            csv_silos(folder)
            times.append(time.process_time() - start)
        seconds[count] = min(times)
    ratio = seconds[16_000] / seconds[4_000]
    return Outcome(f"16,000 columns take {1e3 * seconds[16_000]:.0f} ms, {ratio:.1f} times as long as 4,000", ratio < 7)


@attack("a quote in a CSV file that is not closed, or closed rows later")
def quote():
    from consilience.core.errors import ConsilienceError
    from consilience.data.loaders.silos import csv_silos

    said = []
    for end in ("", '1,"\n'):
        folder = Path(tempfile.mkdtemp())
        rows = "".join(f"{i},b\n" for i in range(100))
        (folder / "a.csv").write_text(f'x,target\n1,a\n2,"a\n{rows}{end}')
        try:
            said.append(f"{len(csv_silos(folder).train)} of 102 rows read")
        except ConsilienceError as error:
            said.append(f"refused, line 3 named: {'line 3' in str(error)}")
    return Outcome("; ".join(said), all("named: True" in one for one in said))


@attack(f"{CONFIGS:,} damaged configs, read and built")
def configs():
    sys.path.append(str(Path(__file__).parents[2] / "tests"))
    from support.mutants import mutants, problem

    logging.disable(logging.CRITICAL)
    os.chdir(tempfile.mkdtemp())
    path = Path("config.toml")
    found: collections.Counter[str] = collections.Counter()

    def late(*_):
        raise _Late

    signal.signal(signal.SIGALRM, late)
    for content in mutants(CONFIGS):
        path.write_bytes(content)
        signal.alarm(int(LONG))
        try:
            what = problem(path)
        except _Late:
            what = f"no end after {LONG:g} s"
        signal.alarm(0)
        if what:
            found[what.partition(":")[0]] += 1
    return Outcome(f"{found.total()} ended in something else than one sentence {dict(found) or ''}", not found)
