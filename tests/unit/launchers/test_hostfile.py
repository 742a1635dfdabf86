"""Hostfiles and `.deepspeed_env`: read, refused by line, made under Slurm; secrets stay here."""

from __future__ import annotations

import io
import stat
from pathlib import Path

import pytest
from deepspeed.launcher.multinode_runner import PDSHRunner
from deepspeed.launcher.runner import _parse_hostfile
from deepspeed.launcher.runner import parse_args as deepspeed_arguments

from bigtrain.cli import main as bigtrain
from bigtrain.errors import LaunchError
from bigtrain.launchers.deepspeed_env import (
    inspect_environment_file,
    is_secret,
    render_environment,
    select_environment,
    write_environment,
)
from bigtrain.launchers.hostfile import (
    describe_unequal,
    hosts_of_slurm,
    parse_hostfile,
    read_hostfile,
    render_hostfile,
)
from bigtrain.system.slurm import expand_nodelist
from tests.support.worlds import ROOT

EXAMPLES = ROOT / "hostfiles"


def problem(text: str) -> str:
    """The one thing that is wrong with `text`."""
    _, problems = parse_hostfile(text)
    assert len(problems) == 1, problems
    return problems[0]


@pytest.mark.parametrize("name", ["one_node", "two_nodes", "unequal_nodes"])
def test_examples_are_read_as_deepspeed_reads_them(name: str) -> None:
    text = (EXAMPLES / name).read_text()
    ours = {host.name: host.slots for host in read_hostfile(EXAMPLES / name)}
    assert ours == dict(_parse_hostfile(text.splitlines()))
    assert render_hostfile(read_hostfile(EXAMPLES / name)) in text + "\n"


def test_unequal_hosts_are_pointed_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, rule = describe_unequal(read_hostfile(EXAMPLES / "unequal_nodes"))
    assert first == "node-3 has slots=4, most hosts 8"
    assert rule.startswith("unequal hosts are allowed")
    assert describe_unequal(read_hostfile(EXAMPLES / "two_nodes")) == []
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost slots=2\n127.0.0.1 slots=2\n127.0.0.2 slots=1\n")
    assert bigtrain(["hostfile", "--check", str(hosts)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[:2] == [f"{hosts}: 3 hosts = 5 processes", "  127.0.0.2 has slots=1, most hosts 2"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a slots=2\r\nb slots=2\r\n", "line 1: has a Windows line ending (CR LF)"),
        (
            "a slots=2\nb slots=2\na slots=2\n",
            "line 3: a is already listed in line 1 -> keep one line",
        ),
        (
            "a slots=2\na slots=3\n",
            "line 2: a is already listed in line 1 -> keep one line, with slots=2 or slots=3",
        ),
        (
            "127.0.0.1 slots 1\n",
            "line 1: '127.0.0.1 slots 1': is not NAME slots=NUMBER -> write 127.0.0.1 slots=1",
        ),
        ("a slots=x\n", "line 1: 'a slots=x': is not NAME slots=NUMBER -> write a slots=N, its"),
        (
            "node 6 slots=8\n",
            "line 1: 'node 6 slots=8': a host name has no spaces -> write the name that ssh "
            "uses, node-6 slots=8 perhaps",
        ),
        ("a slots=2\n slots=2\n", "line 2: 'slots=2': no host before slots"),
        ("a slots=2\nb\n", "line 2: b: no slots -> write the number of its processes: b slots=8"),
        ("a slots=2\nb slots=0\n", "line 2: b slots=0: a host has at least one slot"),
        ("a slots=2\nb: slots=1\n", "line 2: 'b:': is not a host name of letters, digits, dots"),
        ("# nothing\n\n", "the file has no hosts"),
    ],
)
def test_wrong_line_is_named(text: str, said: str) -> None:
    assert problem(text).startswith(said)
    assert " -> " in problem(text)


def test_everything_wrong_is_named_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also what ends on Windows' way, nobody knows, or may be a slip."""
    lines = ["localhost", "127.0.0.1 slots=x", "127.0.0.2 slots=4", "127.0.0.3 slots=1\r"]
    lines += ["127.0.0.4: slots=4", "no.such.host.invalid slots=4", "127.0.0.2 slots=4"]
    (tmp_path / "hosts").write_text("\n".join(lines) + "\n")
    assert bigtrain(["hostfile", "--check", str(tmp_path / "hosts")]) == 2
    said = capsys.readouterr().err
    assert "6 problems in hostfile" in said
    for part in (
        "line 1: localhost: no slots",
        "line 2: '127.0.0.1 slots=x': is not NAME slots=NUMBER",
        "line 4: has a Windows line ending",
        "line 5: '127.0.0.4:': is not a host name of letters, digits, dots and hyphens -> "
        "write 127.0.0.4 slots=4",
        "line 6: no.such.host.invalid: this host name does not resolve here",
        "line 7: 127.0.0.2 is already listed in line 3",
        "127.0.0.3 has slots=1, most hosts 4",
    ):
        assert part in said


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[08-10,3],login", ["n08", "n09", "n10", "n3", "login"]),
        ("r[1-2]c[0-1]-x", ["r1c0-x", "r1c1-x", "r2c0-x", "r2c1-x"]),
    ],
)
def test_node_lists(text: str, names: list[str]) -> None:
    assert expand_nodelist(text) == names


@pytest.mark.parametrize("text", ["", "n[3-1]", "n[1-", "n[a]", "n[0-99999999]"])
def test_node_lists_that_are_none(text: str) -> None:
    with pytest.raises(LaunchError, match="node list"):
        expand_nodelist(text)


def test_hosts_of_a_slurm_job() -> None:
    job = {"SLURM_JOB_NODELIST": "gpu[1-2]", "SLURM_TASKS_PER_NODE": "1(x2)"}
    slots = {
        "tasks": job,
        "gpus": {**job, "SLURM_GPUS_PER_NODE": "h100:8"},
        "on node": {**job, "SLURM_GPUS_ON_NODE": "4"},
    }
    hostfiles_by_name = {name: render_hostfile(hosts_of_slurm(slots[name])) for name in slots}
    assert hostfiles_by_name["tasks"] == "gpu1 slots=1\ngpu2 slots=1\n"
    assert hostfiles_by_name["gpus"] == "gpu1 slots=8\ngpu2 slots=8\n"
    assert hostfiles_by_name["on node"] == "gpu1 slots=4\ngpu2 slots=4\n"
    assert [host.slots for host in hosts_of_slurm(job, slots=3)] == [3, 3]
    with pytest.raises(LaunchError, match="this is not a Slurm job"):
        hosts_of_slurm({})
    unequal = hosts_of_slurm({**job, "SLURM_TASKS_PER_NODE": "2,1"})
    assert describe_unequal(unequal)[0] == "gpu2 has slots=1, most hosts 2"


def test_environment_of_the_hosts(tmp_path: Path) -> None:
    names = "COMET_WORKSPACE CUDA_DEVICE_MAX_CONNECTIONS FI_PROVIDER GLOO_SOCKET_IFNAME HF_HOME"
    names += " HF_TOKEN_PATH NCCL_DEBUG OMP_NUM_THREADS PYTHONPATH PYTORCH_ALLOC_CONF"
    names += " TRITON_CACHE_DIR WANDB_MODE XDG_CACHE_HOME no_proxy"
    forwarded = dict.fromkeys(names.split(), "1") | {"https_proxy": "http://proxy:3128"}
    forwarded["TORCH_CUDA_ARCH_LIST"] = "8.0 9.0"
    secret = dict.fromkeys("COMET_API_KEY HF_TOKEN PGPASSWORD WANDB_API_KEY".split(), "geheim")
    secret["HTTP_PROXY"] = "http://me:geheim@proxy:3128"
    dropped = {"CUDA_VISIBLE_DEVICES": "0", "HOME": "/root", "SITE": "here"}
    # UCX_* and MLFLOW_* DeepSpeed hands on by itself.
    of_deepspeed = {"UCX_TLS": "tcp", "MLFLOW_TRACKING_PASSWORD": "geheim"}
    here = {**forwarded, **secret, **dropped, **of_deepspeed}
    chosen = select_environment(here)
    assert chosen.variables == forwarded
    assert chosen.secrets == sorted(secret)
    assert chosen.dropped == sorted(dropped)
    assert chosen.exposed == ["MLFLOW_TRACKING_PASSWORD"]
    path = tmp_path / ".deepspeed_env"
    write_environment(path, chosen.variables)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    lines = io.StringIO(path.read_text()).readlines()
    # As deepspeed/launcher/runner.py reads it.
    read = dict(line.split("=", maxsplit=1) for line in lines)
    assert read["TORCH_CUDA_ARCH_LIST"].strip() == "'8.0 9.0'"
    assert set(read) == set(forwarded)
    assert inspect_environment_file(path) == []
    assert select_environment(here, ["SITE"]).variables == {**forwarded, "SITE": "here"}
    with pytest.raises(LaunchError, match="MISSING is not set here"):
        select_environment(here, ["MISSING"])
    with pytest.raises(LaunchError, match="HF_HOME: cannot be written to"):
        select_environment({"HF_HOME": "a\nb"})


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("HF_TOKEN", "geheim", "`hf auth login` with HF_HOME on a file system"),
        ("WANDB_API_KEY", "geheim", "`wandb login`, which writes ~/.netrc"),
        ("https_proxy", "http://me:geheim@proxy:3128", "a file of mode 600 that each host reads"),
        ("SITE_PASSWORD", "geheim", "a file of mode 600 that each host reads"),
    ],
)
def test_a_secret_is_never_taken_along(name: str, value: str, instead: str) -> None:
    """DeepSpeed's command line holds whatever the file does."""
    arguments = deepspeed_arguments(["--hostfile", "hosts", "train.py"])
    runner = PDSHRunner(arguments, world_info_base64="")
    runner.add_export(name, value)
    command, _, _ = runner.get_cmd({}, {"n1": [0], "n2": [0]})
    assert "geheim" in " ".join(command)
    with pytest.raises(LaunchError, match=f"{name}: is a secret") as raised:
        select_environment({name: value}, [name])
    assert str(raised.value).count(" -> ") == 1
    assert instead in str(raised.value)
    assert "geheim" not in str(raised.value)


def test_secrets_are_told_by_their_names() -> None:
    secret = ["HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY", "DB_PASSWORD", "GITHUB_TOKEN"]
    secret += ["BIGTRAIN_WEBHOOK_URL", "OTEL_EXPORTER_OTLP_HEADERS"]
    secret += ["OTEL_EXPORTER_OTLP_METRICS_HEADERS"]
    secret += ["PGPASSWORD", "HFTOKEN", "OPENAI_APIKEY", "DB_CREDENTIALS", "SSH_AUTH_SOCK"]
    assert [name for name in secret if not is_secret(name)] == []
    harmless = ["TOKENIZERS_PARALLELISM", "KEYBOARD", "HF_HOME", "PATH", "HF_TOKEN_PATH"]
    harmless += ["AWS_WEB_IDENTITY_TOKEN_FILE", "OMPI_MCA_x", "PASSENGERS", "MONKEY"]
    assert [name for name in harmless if is_secret(name)] == []


def test_bad_environment_file_is_reported(tmp_path: Path) -> None:
    path = tmp_path / ".deepspeed_env"
    assert inspect_environment_file(path) == []
    path.write_text("# mine\nHF_HOME=/data\n\nHF_TOKEN=hf_geheim\n")
    path.chmod(0o644)
    comment, blank, readable = inspect_environment_file(path)
    assert "line 1: is not NAME=VALUE" in comment
    assert "line 3: is blank" in blank
    assert "mode 644 lets others read HF_TOKEN" in readable
    assert "hf_geheim" not in readable
    path.write_text(render_environment({"HF_TOKEN": "x", "https_proxy": "http://a:geheim@b"}))
    path.chmod(0o600)
    [exposed] = inspect_environment_file(path)
    assert "contains HF_TOKEN, https_proxy, which DeepSpeed writes into its log and into" in exposed
    assert "geheim" not in exposed


def test_environment_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_TOKEN", "hf_geheim")
    monkeypatch.setenv("SITE", "here")
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "geheim")
    assert bigtrain(["hostfile", "--environment"]) == 0
    said, warned = capsys.readouterr()
    assert "HF_TOKEN: use `hf auth login`" in said
    assert "DeepSpeed itself puts into command lines on every host: unset these: MLFLOW_TR" in said
    [dropped] = [line for line in said.splitlines() if "not written (--include NAME" in line]
    assert "SITE" in dropped
    assert warned == ""
    assert "ServerAliveInterval" in said
    assert "geheim" not in (tmp_path / ".deepspeed_env").read_text() + said
    (tmp_path / ".deepspeed_env").unlink()
    assert bigtrain(["hostfile", "--environment", "--include", "SITE", "HF_TOKEN"]) == 2
    assert "HF_TOKEN: is a secret" in capsys.readouterr().err
    assert not (tmp_path / ".deepspeed_env").exists()
    # As accelerate's launchers leave it.
    (tmp_path / ".deepspeed_env").write_text("HF_TOKEN=hf_geheim\n")
    assert bigtrain(["hostfile", "--environment", "--include", "SITE"]) == 2
    warned = capsys.readouterr().err
    assert "lets others read HF_TOKEN, which DeepSpeed writes into its log" in warned
    assert "exists and differs" in warned
    assert "geheim" not in warned
    (tmp_path / ".deepspeed_env").unlink()
    assert bigtrain(["hostfile", "--environment", "--include", "SITE"]) == 0
    assert "SITE=here\n" in (tmp_path / ".deepspeed_env").read_text()
