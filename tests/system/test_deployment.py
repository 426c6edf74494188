"""Deployments as users meet them: both apps together, the command, the scripts, and no Flower at all."""

from __future__ import annotations

import importlib
import os
import shlex
import signal
import subprocess
import sys
import tomllib
from functools import partial

import pytest
import torch
from flwr.app import Context, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

import consilience as cs
from consilience.config import read_config, read_deployment
from consilience.core import records
from consilience.data.site import read_site
from consilience.data.tables import agree
from consilience.flower import app as flower_app
from consilience.flower.coordinator import Coordinator
from consilience.flower.deployment.create import write_app
from support.deployment import SILOS, SITES, config_table, new_app, own_files_forgotten, simulation_config
from support.flower_grid import MemoryGrid, unhurried
from support.secure_sums import proofs


@pytest.fixture(autouse=True)
def forget():
    with own_files_forgotten() as forget:
        yield forget


@pytest.fixture
def serve(tmp_path, monkeypatch):
    """Runs an app's server with three sites in memory, up to each of the given rounds; returns the run's directory."""

    def serve(app, *rounds, settings=lambda name: {}):
        monkeypatch.syspath_prepend(str(app))
        components = tomllib.loads((app / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["components"]
        modules = {half: components[half].partition(":") for half in ("serverapp", "clientapp")}
        server, client = (getattr(importlib.import_module(module), name) for module, _, name in modules.values())
        assert isinstance(server, ServerApp)
        assert isinstance(client, ClientApp)
        grid, out = MemoryGrid(), tmp_path / "run"
        for name in SITES:
            grid.start(client, site=name, data=str(SILOS / f"{name}.csv"), states=str(tmp_path / "states"),
                       **settings(name))  # fmt: skip
        with unhurried() as patch:
            patch.setattr(flower_app, "Coordinator", partial(Coordinator, clock=grid.clock, sleep=grid.sleep))
            for last in rounds:
                server(grid, Context(1, 1, {}, RecordDict(), {"rounds": last, "out": str(out)}))
        return out

    return serve


def simulated(app):
    """Two rounds in the simulator of an app's method on the sites' data."""
    settings = config_table(app)["site"]
    deployed = read_deployment(app / "silos_app" / "config.toml")
    sites = {name: read_site(SILOS / f"{name}.csv", classes=("0", "1"), name=name, **settings) for name in SITES}
    preparation = agree({name: site.summary() for name, site in sites.items()}).preparation
    parts = {name: site.prepared(preparation) for name, site in sites.items()}
    return cs.fit(
        deployed.algorithm(),
        deployed.task(0, preparation),
        cs.Federation.from_silos({name: part.train for name, part in parts.items()}),
        rounds=2,
        engine=cs.Simulator(device="cpu", chunk=1, workers=1, precision="float64"),
        progress=False,
    )


GAN = ('model={name="mlp_gan", latent=2, hidden=[4]}', 'task={kind="adversarial", generators=2, pace=0.5}')
GAN += ('algorithm={name="EPGAN"}',)


@pytest.mark.parametrize(
    ("overrides", "rounds", "score"),
    [(('algorithm={name="FedEP", lr=0.3}',), (1, 2), "accuracy"), (GAN, (2,), "recall@2000")],
    ids=["FedEP", "GAN"],
)
def test_both_apps_of_a_new_folder_learn_what_a_simulation_learns(tmp_path, serve, overrides, rounds, score):
    app = new_app(tmp_path / "silos", *overrides, "engine.precision=float64")
    out = serve(app, *rounds)
    found, wanted = cs.load_posterior(out), simulated(app).posterior
    for (_, a), (_, b) in zip(records.leaves(found), records.leaves(wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 2
    assert f'"{score}"' in (out / "evaluation.json").read_text()
    stored = {file.parent.name.partition("-")[0] for file in (tmp_path / "states").rglob("*.safetensors")}
    assert stored == set(SITES)


def test_an_app_with_secure_sums_learns_what_it_learns_without(tmp_path, serve):
    app = new_app(tmp_path / "silos", 'algorithm={name="FedEP", lr=0.3}', "engine.precision=float64")
    config = app / "silos_app" / "config.toml"
    config.write_text(config.read_text().replace("[federation]", "[federation]\nsecure = true"))
    out = serve(app, 2, settings=proofs)
    for (_, a), (_, b) in zip(
        records.leaves(cs.load_posterior(out)), records.leaves(simulated(app).posterior), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)
    assert "secure sums" in (out / "run.json").read_text()
    assert '"clients": []' in (out / "evaluation.json").read_text()


def test_an_app_with_a_model_and_method_of_ones_own_runs(tmp_path, forget, serve):
    algorithm = {"name": "own.py:Cheerful", "lr": 0.3}
    write_app(
        tmp_path / "mine",
        read_config(simulation_config(tmp_path, model={"name": "own.py:Net"}, algorithm=algorithm)),
    )
    forget()  # no site has seen the file at its old place
    assert '"clients": 3' in (serve(tmp_path / "mine", 1) / "metrics.jsonl").read_text()
    assert config_table(tmp_path / "mine")["model"]["name"] == "own.py:Net"


def test_the_command_fills_an_empty_folder_and_prints_the_files(tmp_path, monkeypatch, capsys):
    from consilience import cli

    monkeypatch.chdir(tmp_path)
    simulation_config(tmp_path)
    (tmp_path / "app").mkdir()
    monkeypatch.setattr(sys, "argv", ["consilience", "flower", "new", "app", "simulation.toml"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert not stop.value.code
    assert "app/app_app/config.toml" in capsys.readouterr().err
    assert config_table(tmp_path / "app")["federation"]["clients"] == 3


def test_only_real_federations_need_flower():
    code = (
        "import sys; sys.modules['flwr'] = None\n"
        "import consilience, consilience.cli\n"
        "try: import consilience.flower.deployment\n"
        "except consilience.ConsilienceError as error: print(error)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == ["real federations need Flower: pip install 'consilience[flower]'"]


ECHO = """#!/bin/sh
echo "$(basename "$0")"
for word in "$@"; do echo "$word"; done
echo "FLWR_HOME=$FLWR_HOME telemetry=$FLWR_TELEMETRY_ENABLED no-update-check=$FLWR_DISABLE_UPDATE_CHECK"
"""


@pytest.fixture
def script(tmp_path):
    """Runs a script of a new app with programs that only print: their name, their arguments, their environment."""
    app, programs = new_app(tmp_path / "silos"), tmp_path / "bin"
    programs.mkdir()
    for name in ("flower-superlink", "flwr", "consilience"):
        (programs / name).write_text(ECHO)
        (programs / name).chmod(0o755)

    def run(name, *words, code=0, **environment):
        env = {"PATH": f"{programs}:{os.environ['PATH']}", "HOME": str(tmp_path / "home"), **environment}
        ended = subprocess.run([app / name, *words], capture_output=True, text=True, env=env, cwd=tmp_path)
        assert ended.returncode == code, ended.stderr
        return (ended.stdout or ended.stderr).splitlines()

    return run


def option(words, name):
    return words[words.index(name) + 1]


def test_the_server_listens_to_its_own_machine_with_certificates_and_keys_unless_insecure(script, tmp_path):
    words = script("superlink.sh", "--log-file", "x.log", SUPERLINK_PORT="8123")
    assert words[0] == "flower-superlink"
    assert (option(words, "--host"), option(words, "--port")) == ("127.0.0.1", "8123")
    assert "--disable-runtime-dependency-installation" in words
    assert "--enable-supernode-auth" in words
    assert option(words, "--ssl-certfile") == "certificates/server.crt"
    assert option(words, "--log-file") == "x.log"
    home = tmp_path / "silos" / ".flwr" / "server"
    assert words[-1] == f"FLWR_HOME={home} telemetry=0 no-update-check=1"
    words = script("superlink.sh", "--insecure")
    assert "--insecure" in words
    assert not {"--enable-supernode-auth", "--ssl-certfile"} & set(words)


def test_a_site_sends_its_name_and_uses_its_key_unless_insecure(script, tmp_path):
    words = script("supernode.sh", "St. Gallen", "data/x.csv", "--max-retries", "3", NODE_PORT="9001", DEVICE="cuda")
    app = tmp_path / "silos"
    assert words[:3] == ["consilience", "flower", "node"]
    assert shlex.split(option(words, "--node-config")) == [
        "site=St. Gallen",
        f"data={tmp_path}/data/x.csv",
        f"states={app}/states",
        "device=cuda",
        f"policy={app}/policy.toml",
    ]
    assert (option(words, "--port"), option(words, "--superlink")) == ("9001", "localhost:8443")
    assert option(words, "--authority") == f"{app}/certificates/ca.crt"
    assert option(words, "--certificate") == f"{app}/certificates/St. Gallen.crt"
    assert option(words, "--key") == f"{app}/keys/St. Gallen"
    assert option(words, "--max-retries") == "3"
    assert "--allow-runtime-dependency-installation" not in words
    assert words[-1] == f"FLWR_HOME={app}/.flwr/node-9001 telemetry=0 no-update-check=1"
    words = script("supernode.sh", "--insecure", "Chur", "/data", SUPERLINK="10.0.0.1:8000")
    assert "--insecure" in words
    assert not {"--authority", "--certificate", "--key"} & set(words)
    assert option(words, "--superlink") == "10.0.0.1:8000"
    (app / "policy.toml").unlink()
    assert "policy" not in option(script("supernode.sh", "Chur", "/data"), "--node-config")
    words = script("supernode.sh", "Chur", "/data", POLICY="own.toml")
    assert shlex.split(option(words, "--node-config"))[-1] == f"policy={tmp_path}/own.toml"
    assert "usage" in script("supernode.sh", "Chur", code=2)[0]
    assert "must not contain quotes" in script("supernode.sh", 'Chur" x="1', "/data", code=2)[0]


FLWR = """#!/bin/sh
echo "$*" >>"$FLWR_HOME/calls"
case "$1" in
  run) echo '{"success": true, "run-id": "1234567890123456789"}' ;;
  log) echo "FLWR_HOME=$FLWR_HOME telemetry=$FLWR_TELEMETRY_ENABLED no-update-check=$FLWR_DISABLE_UPDATE_CHECK"
    [ "${ENDLESS:-}" ] && exec sleep 60 ;;
esac
exit 0
"""


@pytest.fixture
def flwr(script, tmp_path):
    """Flower's command, which says that it has started run 1234567890123456789. Returns its calls."""
    (tmp_path / "bin" / "flwr").write_text(FLWR)
    return lambda: (tmp_path / "silos" / ".flwr" / "command" / "calls").read_text().splitlines()


@pytest.mark.parametrize("insecure", [[], ["--insecure"]])
def test_a_run_starts_without_files_in_the_users_home(script, flwr, tmp_path, insecure):
    words = script("run.sh", *insecure, "--run-config", "rounds=5", SUPERLINK_PORT="8123")
    app = tmp_path / "silos"
    assert flwr() == [
        f"run {app} federation --format json --run-config rounds=5",
        "log 1234567890123456789 federation --stream",
    ]
    assert words == [f"FLWR_HOME={app}/.flwr/command telemetry=0 no-update-check=1"]
    superlink = tomllib.loads((app / ".flwr" / "command" / "config.toml").read_text())["superlink"]
    trust = {"insecure": True} if insecure else {"root-certificates": f"{app}/certificates/ca.crt"}
    assert superlink == {"default": "federation", "federation": {"address": "127.0.0.1:8123", **trust}}
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_stops_the_run(script, flwr, tmp_path, number):
    env = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "ENDLESS": "1"}
    options = {"env": env, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([tmp_path / "silos" / "run.sh"], start_new_session=True, **options) as run:
        run.stdout.readline()
        os.killpg(run.pid, number)
        assert "stopping run 1234567890123456789" in run.communicate(timeout=20)[1]
    assert run.returncode == 130
    assert flwr()[-1] == "stop 1234567890123456789"


def test_a_run_can_be_started_in_the_background(script, flwr):
    assert script("run.sh", "--insecure", "--detach") == ["run 1234567890123456789"]
    assert len(flwr()) == 1


def test_a_run_that_is_not_started_is_an_error(script, tmp_path):
    assert script("run.sh", code=1)[0] == "flwr"


def test_a_site_is_registered_with_its_name_and_gets_a_certificate(script, tmp_path):
    words = script("register.sh", "St. Gallen", "St. Gallen.pub")
    certificate = ["flower", "certificate", "--site", "St. Gallen", "--key", "St. Gallen.pub", "--certificates"]
    assert words[:9] == ["consilience", *certificate, str(tmp_path / "silos" / "certificates")]
    assert words[10:-1] == ["flwr", "supernode", "register", "St. Gallen.pub", "--name", "St. Gallen"]
    assert "usage" in script("register.sh", "St. Gallen", code=2)[0]


@pytest.mark.parametrize(
    "words", [["superlink.sh"], ["gate.sh"], ["supernode.sh", "Chur", "/data"], ["flwr.sh"], ["register.sh", "a", "b"]]
)
def test_no_other_account_reads_what_the_scripts_write(script, tmp_path, words):
    for name in ("flower-superlink", "flwr", "consilience"):
        (tmp_path / "bin" / name).write_text('#!/bin/sh\ntouch "${0%/*}/made"\n')
    script(*words, FLWR_HOME=str(tmp_path))
    assert oct((tmp_path / "bin" / "made").stat().st_mode)[-3:] == "600"
    if (home := tmp_path / "silos" / ".flwr").exists():
        assert oct(home.stat().st_mode)[-3:] == "700"


def test_sites_connect_to_the_gate(script, tmp_path):
    words = script("gate.sh", SUPERLINK_PORT="8123", GATE_PORT="9443")
    assert words[:3] == ["consilience", "flower", "gate"]
    assert (option(words, "--superlink"), option(words, "--port")) == ("127.0.0.1:8123", "9443")
    assert option(words, "--certificates") == str(tmp_path / "silos" / "certificates")
