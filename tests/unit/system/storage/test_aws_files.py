"""Files of the AWS CLI are enough to read a bucket of a real server; no secret of them is told."""

from __future__ import annotations

import json
import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from bigtrain.system.storage.aws_files import FileCredentials, read_profile, s3_options
from bigtrain.system.storage.object_store import bucket_client, kept_client
from bigtrain.system.storage.open_store import store_of
from bigtrain.system.storage.stores import Refused
from tests.support.remote_servers import S3_VARIABLES, s3_server

KEY, SECRET = S3_VARIABLES["AWS_ACCESS_KEY_ID"], S3_VARIABLES["AWS_SECRET_ACCESS_KEY"]
KEYS = f"aws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\n"
ADDRESS = "s3://bucket/a.txt"


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    root = tmp_path_factory.mktemp("server")
    (root / "bucket").mkdir()
    (root / "bucket/a.txt").write_text("hello")
    with s3_server(root) as found:
        yield found


@pytest.fixture
def aws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """``~/.aws`` of a home of its own, without any variable of AWS."""
    for name in [*os.environ]:
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    (tmp_path / ".aws").mkdir()
    return tmp_path / ".aws"


def size() -> int | None:
    return store_of(ADDRESS).stat(ADDRESS).size


def text() -> bytes:
    store = store_of(ADDRESS)
    return b"".join(map(bytes, store.read(ADDRESS, 0, None, store.stat(ADDRESS))))


def test_the_default_profile(aws: Path, port: int, caplog: pytest.LogCaptureFixture) -> None:
    server = f"http://127.0.0.1:{port}"
    (aws / "credentials").write_text(f"[default]\n{KEYS}")
    (aws / "config").write_text(f"[default]\nregion = eu-west-3\nendpoint_url = {server}\n")
    with caplog.at_level(logging.DEBUG):
        assert text() == b"hello"
    assert bucket_client("s3://bucket").config["region"] == "eu-west-3"
    assert SECRET not in caplog.text


def test_a_named_profile_of_other_files(
    aws: Path, port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys in the file on settings, and the server of one service alone."""
    (tmp_path / "elsewhere").write_text(
        f"[default]\nregion = nowhere\n[profile work]\nregion = us-east-1\nservices = mine\n{KEYS}"
        f"[services mine]\ns3 =\n  endpoint_url = http://127.0.0.1:{port}\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("AWS_PROFILE", "work")
    assert size() == 5


def test_keys_of_a_process(aws: Path, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    program = aws / "keys.sh"
    told = {
        "Version": 1,
        "AccessKeyId": KEY,
        "SecretAccessKey": SECRET,
        "Expiration": "2126-01-01T00:00:00Z",
    }
    program.write_text(f"#!/bin/sh\necho '{json.dumps(told)}'\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    (aws / "config").write_text(f"[default]\ncredential_process = {program}\n")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    assert size() == 5
    kept_client.cache_clear()  # the keys are valid for a century
    program.write_text(f"#!/bin/sh\necho {SECRET} >&2\necho {SECRET}\nexit 7\n")
    with pytest.raises(Refused, match=r"profile default .* ended with exit code 7") as error:
        size()
    assert SECRET not in str(error.value)
    kept_client.cache_clear()
    program.write_text(f"#!/bin/sh\necho {SECRET}\n")
    with pytest.raises(Refused, match="does not print credentials") as error:
        size()
    assert SECRET not in str(error.value)


def test_variables_come_before_files(aws: Path, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    (aws / "credentials").write_text(
        "[default]\naws_access_key_id = x\naws_secret_access_key = y\n"
    )
    (aws / "config").write_text("[default]\nregion = x\nendpoint_url = http://127.0.0.1:9\n")
    for name, value in S3_VARIABLES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    assert s3_options(os.environ) == {}
    assert size() == 5
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    with pytest.raises(Refused, match=r"the profile AWS_PROFILE of ~/\.aws"):
        size()  # by the wrong keys of the file


def test_new_keys_in_the_file_are_found(aws: Path) -> None:
    (aws / "credentials").write_text("[default]\naws_access_key_id=1\naws_secret_access_key=%2\n")
    found = s3_options(os.environ)["credential_provider"]
    assert isinstance(found, FileCredentials)
    assert (found()["access_key_id"], found()["secret_access_key"]) == ("1", "%2")
    (aws / "credentials").write_text(
        "[default]\naws_access_key_id=3\naws_secret_access_key=4\naws_session_token=5\n"
    )
    keys = found()
    assert (keys["access_key_id"], keys["token"]) == ("3", "5")


@pytest.mark.parametrize(
    ("config", "profile", "message"),
    [
        ("[profile a]\nregion = x\n[services s]\n", "b", r"'b': neither .*one of these: a$"),
        ("[profile a]\nrole_arn = r\n", "a", "has role_arn, .*export-credentials --profile a "),
        ("[profile a]\nsso_session = s\n", "a", "has sso_session, .*export-credentials"),
        ("[profile a]\naws_access_key_id = k\n", "a", "no aws_secret_access_key next to it"),
        (f"{SECRET}\n", "a", r"config cannot be read: MissingSectionHeaderError$"),
        ("[profile a]\ncredential_process = /no/such\n", "a", "cannot be started"),
    ],
)
def test_what_is_refused(
    config: str, profile: str, message: str, aws: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (aws / "config").write_text(config)
    monkeypatch.setenv("AWS_PROFILE", profile)
    with pytest.raises(Refused, match=message) as error:
        s3_options(os.environ)
    assert SECRET not in str(error.value)


def test_without_files(aws: Path) -> None:
    assert read_profile(os.environ) is None
    assert s3_options(os.environ) == {}
