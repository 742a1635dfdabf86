"""Buckets of S3, Google and Azure, through obstore: one small library without dependencies."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any

from bigtrain.errors import without_secrets
from bigtrain.system.storage.aws_files import read_profile, s3_options
from bigtrain.system.storage.stores import (
    AccessDeniedError,
    NotFoundError,
    RemoteStat,
    Store,
    TransientError,
    changed,
    joined,
    scheme_of,
    unreadable,
)

CHUNK_BYTES = 1 << 20
CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (AWS_SKIP_SIGNATURE=true for public ones), "
    "or the profile AWS_PROFILE of ~/.aws",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
}


class ObjectStore(Store):
    """Store configured by the variables of the vendors' own tools (AWS_ENDPOINT_URL for servers
    other than AWS) and by the files of AWS's tools."""

    def stat(self, address: str) -> RemoteStat:
        import obstore

        bucket, path = _split(address)
        with _translated_errors(address):
            return _stat(obstore.head(bucket_client(bucket), path))

    def read(
        self, address: str, begin: int, end: int | None, listed: RemoteStat
    ) -> Iterator[bytes | memoryview]:
        import obstore

        bucket, path = _split(address)
        stop = listed.size if end is None else end
        if stop is not None and begin >= stop:
            return
        options: Any = (
            {"range": (begin, stop)} if stop is not None else {"range": {"offset": begin}}
        )
        arrived = begin
        with _translated_errors(address):
            answer = obstore.get(bucket_client(bucket), path, options=options)
            if not listed.is_same(_stat(answer.meta)):  # not every server supports If-Match
                raise changed(address)
            for chunk in answer.stream(min_chunk_size=CHUNK_BYTES):
                view = memoryview(chunk)
                arrived += len(view)
                yield view
        if stop is not None and arrived < stop:
            raise TransientError("the connection ended early")

    def find(self, address: str) -> list[tuple[str, RemoteStat]]:
        import obstore

        bucket, path = _split(address)
        with _translated_errors(address):
            batches = obstore.list(bucket_client(bucket), prefix=path.rstrip("/") or None)
            entries = [entry for batch in batches for entry in batch]
        listed = [(joined(bucket, entry["path"]), _stat(entry)) for entry in entries]
        return sorted(listed, key=lambda entry: entry[0])

    def put(self, address: str, content: Path | bytes) -> None:
        import obstore

        bucket, path = _split(address)
        with _translated_errors(address):
            obstore.put(bucket_client(bucket), path, content)


def _split(address: str) -> tuple[str, str]:
    """Return the address of the bucket, and the path inside the bucket."""
    scheme, _, bucket_path = address.partition("://")
    bucket, _, path = bucket_path.partition("/")
    return f"{scheme}://{bucket}", path


def bucket_client(address: str) -> Any:
    """Return the client for a bucket, as variables and ``~/.aws`` configure it now. Raises
    AccessDeniedError."""
    prefixes = ("AWS_", "GOOGLE_", "AZURE_", "GCP_", "GCS_", "HOME")
    environment = {name: value for name, value in os.environ.items() if name.startswith(prefixes)}
    profile = read_profile() if scheme_of(address).startswith("s3") else None
    return kept_client(address, tuple(sorted(environment.items())), repr(profile))


@lru_cache(maxsize=16)
def kept_client(address: str, _environment: tuple[tuple[str, str], ...], _profile: str) -> Any:
    """Return the cached client for a bucket and its configuration; it keeps its connections."""
    from obstore.store import from_url

    options = s3_options() if scheme_of(address).startswith("s3") else {}
    # An explicit http:// endpoint is intended.
    names = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT", "GOOGLE_BASE_URL")
    servers = [*(os.environ.get(name, "") for name in names), str(options.get("endpoint", ""))]
    plain = any(server.startswith("http://") for server in servers)
    # Broken transfers are retried and logged above; here only requests without any response.
    return from_url(
        address,
        client_options={"timeout": "120s", "connect_timeout": "10s", "allow_http": plain},
        retry_config={"max_retries": 1, "retry_timeout": timedelta(seconds=30)},
        **options,
    )


@contextmanager
def _translated_errors(address: str) -> Iterator[None]:
    """Translate obstore's errors."""
    from obstore import exceptions

    try:
        yield
    except FileNotFoundError:
        raise NotFoundError(f"{without_secrets(address)} does not exist") from None
    except exceptions.PreconditionError:
        raise changed(address) from None
    except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError):
        names = CREDENTIALS.get(scheme_of(address)[:2], "the variables of its vendor's tools")
        raise AccessDeniedError(
            f"{without_secrets(address)}: access denied by the server -> credentials are read "
            f"from {names}"
        ) from None
    except (ValueError, exceptions.InvalidPathError, exceptions.NotSupportedError) as error:
        raise unreadable(address, _reason(error)) from None
    except (exceptions.BaseError, OSError) as error:
        raise TransientError(_reason(error)) from None


def _reason(error: Exception) -> str:
    """Return the first lines of an error, without debug output."""
    text = str(error).partition("\n\nDebug source")[0]
    return without_secrets(f"{type(error).__name__}: {' '.join(text.split())[:300]}")


def _stat(entry: Any) -> RemoteStat:
    modified = int(entry["last_modified"].timestamp()) * 10**9
    version = entry["e_tag"]  # listings of some servers omit the quotes
    return RemoteStat(int(entry["size"]), None if version is None else version.strip('"'), modified)
