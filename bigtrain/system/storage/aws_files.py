"""Profiles in the files of AWS's own tools, for obstore, which itself reads only variables.

The order is that of botocore: variables before files; of a profile, the keys in
``~/.aws/credentials`` before its ``credential_process`` and those in ``~/.aws/config``. Settings
for which a profile must query a server (a role, SSO) are rejected by name: use the AWS CLI for
those. Error texts contain only names.
"""

from __future__ import annotations

import configparser
import json
import re
import shlex
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from bigtrain.system.storage.stores import Refused

_READ_AGAIN = timedelta(minutes=15)
"""Interval after which keys are read from their file again: other programs may rotate them."""
_PROCESS_SECONDS = 60


@dataclass(frozen=True)
class AwsFiles:
    """Name of a profile and its settings in both files."""

    name: str
    keys: Mapping[str, str]
    config: Mapping[str, str]
    services: Mapping[str, str]

    @property
    def region(self) -> str | None:
        """Region of its buckets."""
        return self.config.get("region") or self.keys.get("region")

    @property
    def endpoint(self) -> str | None:
        """Endpoint of a server other than AWS: for S3, or for all services."""
        nested = re.search(r"^\s*endpoint_url\s*=\s*(\S+)", self.services.get("s3", ""), flags=re.M)
        return nested[1] if nested else self.config.get("endpoint_url")


def read_profile(environ: Mapping[str, str]) -> AwsFiles | None:
    """Return the profile that AWS_PROFILE names, or ``default``; None if it does not exist.

    Raises Refused for a name that no file has, and for a file that cannot be read.
    """
    asked = environ.get("AWS_PROFILE") or environ.get("AWS_DEFAULT_PROFILE")
    name = asked or "default"
    home = Path(environ.get("HOME") or Path.home()) / ".aws"
    places = (
        Path(environ.get("AWS_SHARED_CREDENTIALS_FILE") or home / "credentials").expanduser(),
        Path(environ.get("AWS_CONFIG_FILE") or home / "config").expanduser(),
    )
    credentials, config = map(_sections, places)
    profiles = {re.sub(r"^profile\s+", "", section): section for section in config}
    if name not in credentials and name not in profiles:
        if asked is None:
            return None
        non_profiles = {one for one in profiles if one.startswith(("services ", "sso-session "))}
        known = ", ".join(sorted({*credentials, *profiles} - non_profiles)) or "none"
        raise Refused(
            f"AWS_PROFILE = {name!r}: neither {places[0]} nor {places[1]} has such a profile -> "
            f"one of these: {known}"
        )
    own = config.get(profiles.get(name, ""), {})
    services = config.get(f"services {own.get('services', '')}", {})
    return AwsFiles(name, credentials.get(name, {}), own, services)


def _sections(path: Path) -> dict[str, dict[str, str]]:
    parser = configparser.RawConfigParser(default_section="\0")
    try:
        parser.read_string(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, configparser.Error) as error:  # its text quotes the lines
        raise Refused(f"{path} cannot be read: {type(error).__name__}") from None
    return {name: dict(parser.items(name)) for name in parser.sections()}


def s3_options(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the files' settings that no variable overrides, as arguments of
    ``obstore.store.from_url``.

    Raises Refused as `read_profile`, and if the profile's keys are unavailable.
    """
    profile = read_profile(environ)
    if profile is None:
        return {}
    options: dict[str, Any] = {}
    if profile.region and not _has(environ, "AWS_REGION", "AWS_DEFAULT_REGION"):
        options["region"] = profile.region
    ignored = environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() == "true"
    names = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT")
    if profile.endpoint and not ignored and not _has(environ, *names):
        options["endpoint"] = profile.endpoint
    others = ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE")
    unsigned = environ.get("AWS_SKIP_SIGNATURE", "").lower() in ("true", "1")
    if not unsigned and not _has(environ, *others) and _signs(profile):
        options["credential_provider"] = FileCredentials(environ, profile)
    return options


def _has(environ: Mapping[str, str], *names: str) -> bool:
    return any(environ.get(name) for name in names)


def _signs(profile: AwsFiles) -> bool:
    """Return whether the profile has keys or a way to get them; if not, the machine's role
    signs."""
    has_keys = any("aws_access_key_id" in part for part in (profile.keys, profile.config))
    asks = [name for name in profile.config if name in ("role_arn", "sso_session", "sso_start_url")]
    if asks and (asks[0] == "role_arn" or not has_keys):
        raise Refused(
            f"profile {profile.name} of ~/.aws/config has {asks[0]}, which bigtrain cannot use "
            '-> eval "$(aws configure export-credentials --profile '
            f'{profile.name} --format env)", or a profile with credential_process = aws configure '
            f"export-credentials --profile {profile.name}"
        )
    return has_keys or "credential_process" in profile.config


class FileCredentials:
    """Credential provider for obstore. The first keys are read at once, so that missing keys are
    detected early; later calls read them again."""

    def __init__(self, environ: Mapping[str, str], profile: AwsFiles) -> None:
        """Raise Refused if the profile's keys are unavailable."""
        self._environ = dict(environ)
        self._first: dict[str, Any] | None = _keys_of(profile)

    def __call__(self) -> dict[str, Any]:
        keys, self._first = self._first, None
        if keys is not None:
            return keys
        profile = read_profile(self._environ)
        if profile is None:
            raise Refused("the profile was removed from ~/.aws")
        return _keys_of(profile)


def _keys_of(profile: AwsFiles) -> dict[str, Any]:
    """Return the keys in obstore's format."""
    command = profile.config.get("credential_process")
    if "aws_access_key_id" not in profile.keys and command is not None:
        return _from_process(profile.name, command)
    part = profile.keys if "aws_access_key_id" in profile.keys else profile.config
    secret = part.get("aws_secret_access_key")
    if not secret:
        raise Refused(
            f"profile {profile.name} of ~/.aws has aws_access_key_id, but no "
            "aws_secret_access_key next to it -> aws configure"
        )
    return {
        "access_key_id": part["aws_access_key_id"],
        "secret_access_key": secret,
        "token": part.get("aws_session_token"),
        "expires_at": datetime.now(UTC) + _READ_AGAIN,
    }


def _from_process(profile: str, command: str) -> dict[str, Any]:
    """Run the program and return its credentials (AWS's version 1). Its stderr is not forwarded."""

    def refused(why: str) -> Refused:
        return Refused(
            f"credential_process of profile {profile} in ~/.aws/config {why} -> run it by hand"
        )

    try:
        done = subprocess.run(
            shlex.split(command), capture_output=True, timeout=_PROCESS_SECONDS, check=True
        )
        told = json.loads(done.stdout)
        expires = told.get("Expiration")
        return {
            "access_key_id": told["AccessKeyId"],
            "secret_access_key": told["SecretAccessKey"],
            "token": told.get("SessionToken"),
            "expires_at": None if expires is None else datetime.fromisoformat(expires),
        }
    except subprocess.CalledProcessError as error:
        raise refused(f"ended with exit code {error.returncode}") from None
    except subprocess.TimeoutExpired:
        raise refused(f"has not ended after {_PROCESS_SECONDS} seconds") from None
    except OSError as error:
        raise refused(f"cannot be started ({error.strerror})") from None
    except (ValueError, KeyError, AttributeError, TypeError):
        raise refused("does not print credentials of version 1 as JSON") from None
