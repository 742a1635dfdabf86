"""What is an address, and that none is shown or recorded with its secrets."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from bigtrain.errors import ConfigError, DataError, LaunchError, without_secrets
from bigtrain.run.reporting.metrics import MetricsWriter
from bigtrain.settings.loading import load_run_config
from bigtrain.system.storage.stores import (
    StorageError,
    is_address,
    joined,
    name_of,
    scheme_of,
)


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        ("s3://bucket/a.jsonl", "s3"),
        ("HTTPS://host/a", "https"),
        ("hf://datasets/owner/name/a.parquet", "hf"),
        ("zip://a.jsonl::s3://bucket/x.zip", "zip"),
        ("a.jsonl", None),
        ("folder/owner/name", None),
        ("C:/x", None),
        ("-", None),
    ],
)
def test_schemes(name: str, scheme: str | None) -> None:
    assert is_address(name) == (scheme is not None)
    if scheme is not None:
        assert scheme_of(name) == scheme


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://me:pw@host/a?id=3", "https://host/a?id=3"),
        ("HTTP://me:p@pw@host/a", "HTTP://host/a"),
        ("'http://me:pw@host' and ftp://pw@host:1/a@b", "'http://host' and ftp://host:1/a@b"),
        (
            "https://b.s3.amazonaws.com/a.jsonl?X-Amz-Algorithm=AWS4&X-Amz-Credential=AK%2F1"
            "&X-Amz-Expires=60&X-Amz-Signature=beef&versionId=7",
            "https://b.s3.amazonaws.com/a.jsonl?versionId=7",
        ),
        ("https://x.blob.core.windows.net/c/a?sv=1&se=2&sr=b&sp=r&sig=QQ%3D", None),
        ("https://storage.googleapis.com/b/a?Expires=1&GoogleAccessId=x&Signature=zz", None),
        ("https://host/a?access_token=abc&page=2#x", "https://host/a?page=2#x"),
        ("url: /a?id=1&token=abc (Caused by x)", "url: /a?id=1 (Caused by x)"),
        ("s3://bucket/a=1/b&c.jsonl", "s3://bucket/a=1/b&c.jsonl"),
        ("Is it so? Yes & no.", "Is it so? Yes & no."),
    ],
)
def test_secrets_are_left_out(text: str, shown: str | None) -> None:
    cleaned = without_secrets(text)
    if shown is not None:
        assert cleaned == shown
    for secret in ("pw", "beef", "AK%2F1", "QQ", "zz", "abc"):
        assert secret not in cleaned
    assert without_secrets(cleaned) == cleaned


def test_names() -> None:
    assert name_of("https://host/a/b.jsonl.gz?x=1.txt#y") == "https://host/a/b.jsonl.gz"
    assert name_of("s3://bucket/a?b.jsonl") == "s3://bucket/a?b.jsonl"
    assert name_of("zip://a.jsonl::s3://bucket/x.zip") == "zip://a.jsonl"
    assert joined("s3://bucket/a/", "b/c") == "s3://bucket/a/b/c"


SECRET = "hunter2"
ADDRESSES = (f"http://me:{SECRET}@host/x", f"https://host/x?X-Amz-Signature={SECRET}&id=1")


@pytest.mark.parametrize(
    "override",
    [
        "data.path={}",
        "data.path=[{}]",
        "{}",
        "model.path={}",
        "output.copy_to={}",
        "engine.deepspeed_config={}",
        "callbacks=[{{type: webhook, settings: {{url_env: {}}}}}]",
        "callbacks=[{{type: my.Own, settings: {{hook: [{{to: '{}'}}]}}}}]",
        "sites.server={}",
    ],
)
def test_no_setting_is_accepted_or_shown_with_a_secret(override: str) -> None:
    """Settings are recorded, logged and sent to trackers: none reaches them."""
    for address in ADDRESSES:
        with pytest.raises(ConfigError) as error:
            load_run_config("quickstart", [override.format(address)])
        assert SECRET not in str(error.value)
        assert SECRET not in "".join(map(str, error.value.problems))


@pytest.mark.parametrize("address", ADDRESSES)
def test_no_error_and_no_line_of_a_log_has_a_secret(address: str, tmp_path: Path) -> None:
    for kind in (DataError, LaunchError, StorageError):
        assert SECRET not in str(kind(f"{address} cannot be read"))
        assert SECRET not in str(pickle.loads(pickle.dumps(kind(address))))
    log = MetricsWriter(tmp_path, total_steps=1, trackers=(), project="x", run_config={})
    with log:
        log.info(f"reading {address}")
        log.note(f"read {address}")
        log.log_event("warning", step=1, text=f"{address} is slow", more={"at": [address]})
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"log.txt", "metrics.jsonl"} <= {path.name for path in files}
    assert not [path for path in files if SECRET in path.read_text()]
