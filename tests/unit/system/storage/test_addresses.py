"""What is an address, and that none is shown or recorded with its secrets."""

from __future__ import annotations

import pytest

from bigtrain.system.storage.stores import (
    is_address,
    joined,
    name_of,
    scheme_of,
    without_secrets,
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
