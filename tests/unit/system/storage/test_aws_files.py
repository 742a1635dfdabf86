"""Files of the AWS CLI are enough to read a bucket of a real server; no secret of them is told."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import stat
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from bigtrain.system.storage.aws_files import ProfileCredentials, read_profile, s3_options
from bigtrain.system.storage.object_store import bucket_client, kept_client
from bigtrain.system.storage.remote_file import store_of
from bigtrain.system.storage.stores import AccessDeniedError
from tests.support.remote_servers import S3_VARIABLES, s3_server

KEY, SECRET = S3_VARIABLES["AWS_ACCESS_KEY_ID"], S3_VARIABLES["AWS_SECRET_ACCESS_KEY"]
KEYS = f"aws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\n"
ADDRESS = "s3://bucket/a.txt"


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    root = tmp_path_factory.mktemp("server")
    (root / "bucket").mkdir()
    (root / "bucket/a.txt").write_text("hello")
    with s3_server(root) as server_port:
        yield server_port


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
    with pytest.raises(
        AccessDeniedError, match=r"profile default .* \(CredentialRetrievalError\)"
    ) as error:
        size()
    assert SECRET not in str(error.value)
    kept_client.cache_clear()
    program.write_text(f"#!/bin/sh\necho {SECRET}\n")
    with pytest.raises(AccessDeniedError, match=r"credential_process: JSONDecodeError") as error:
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
    assert s3_options() == {}
    assert size() == 5
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    with pytest.raises(AccessDeniedError, match=r"the profile AWS_PROFILE of ~/\.aws"):
        size()  # by the wrong keys of the file


def test_new_keys_in_the_file_are_found(aws: Path) -> None:
    (aws / "credentials").write_text("[default]\naws_access_key_id=1\naws_secret_access_key=%2\n")
    provider = s3_options()["credential_provider"]
    assert isinstance(provider, ProfileCredentials)
    assert (provider()["access_key_id"], provider()["secret_access_key"]) == ("1", "%2")
    (aws / "credentials").write_text(
        "[default]\naws_access_key_id=3\naws_secret_access_key=4\naws_session_token=5\n"
    )
    keys = provider()
    assert (keys["access_key_id"], keys["token"]) == ("3", "5")


@pytest.mark.parametrize(
    ("config", "profile", "message"),
    [
        ("[profile a]\nregion = x\n[services s]\n", "b", r"'b': neither .*one of these: a$"),
        ("[profile a]\nrole_arn = r\n", "a", r"no credentials \(PartialCredentialsError|missing"),
        ("[profile a]\nsso_session = s\n", "a", r"no credentials \("),
        ("[profile a]\naws_access_key_id = k\n", "a", "aws_secret_access_key is missing"),
        (f"{SECRET}\n", "a", r"~/\.aws cannot be read: ConfigParseError$"),
        ("[profile a]\ncredential_process = /no/such\n", "a", "FileNotFoundError"),
    ],
)
def test_what_is_refused(
    config: str, profile: str, message: str, aws: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (aws / "config").write_text(config)
    monkeypatch.setenv("AWS_PROFILE", profile)
    with pytest.raises(AccessDeniedError, match=message) as error:
        s3_options()
    assert SECRET not in str(error.value)


def test_without_files(aws: Path) -> None:
    assert read_profile() is None
    assert s3_options() == {}


class AwsApi(BaseHTTPRequestHandler):
    """Two calls of AWS: AssumeRole of STS, and the credentials of an SSO login."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"])).decode()
        assert "Action=AssumeRole" in body
        assert "RoleArn=arn%3Aaws%3Aiam%3A%3A1%3Arole%2Fr" in body
        self._answer(
            "<AssumeRoleResponse><AssumeRoleResult><Credentials>"
            f"<AccessKeyId>{KEY}</AccessKeyId><SecretAccessKey>{SECRET}</SecretAccessKey>"
            "<SessionToken></SessionToken><Expiration>2126-01-01T00:00:00Z</Expiration>"
            "</Credentials></AssumeRoleResult></AssumeRoleResponse>"
        )

    def do_GET(self) -> None:
        assert self.headers["x-amz-sso_bearer_token"] == "a login"
        role = {"accessKeyId": KEY, "secretAccessKey": SECRET, "sessionToken": "", "expiration": 1}
        self._answer(json.dumps({"roleCredentials": role | {"expiration": 4_900_000_000_000}}))

    def _answer(self, text: str) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("kind", ["role", "sso"])
def test_roles_and_sso_logins(
    kind: str, aws: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), AwsApi)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    own = f"http://127.0.0.1:{server.server_address[1]}"
    for service in ("STS", "SSO"):
        monkeypatch.setenv(f"AWS_ENDPOINT_URL_{service}", own)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{port}")
    start = "https://own.awsapps.com/start"
    how = {
        "role": "role_arn = arn:aws:iam::1:role/r\nsource_profile = base\n",
        "sso": "sso_session = s\nsso_account_id = 123456789012\nsso_role_name = reader\n",
    }
    (aws / "config").write_text(
        f"[default]\nregion = us-east-1\n{how[kind]}"
        "[profile base]\naws_access_key_id = x\naws_secret_access_key = y\n"
        f"[sso-session s]\nsso_region = us-east-1\nsso_start_url = {start}\n"
    )
    (aws / "sso/cache").mkdir(parents=True)
    login = {"accessToken": "a login", "expiresAt": "2126-01-01T00:00:00Z", "startUrl": start}
    name = hashlib.sha1(b"s").hexdigest()  # where `aws sso login` keeps it
    (aws / f"sso/cache/{name}.json").write_text(json.dumps(login | {"region": "us-east-1"}))
    # botocore computes it from HOME when it is imported.
    monkeypatch.setattr(
        "botocore.tokens.SSOTokenProvider._SSO_TOKEN_CACHE_DIR", str(aws / "sso/cache")
    )
    kept_client.cache_clear()
    try:
        assert size() == 5
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
