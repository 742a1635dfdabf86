"""Profiles of the AWS CLI as options of obstore, which itself reads only variables.

botocore reads the files, runs a ``credential_process``, assumes roles and uses SSO logins, as the
CLI does. Variables take precedence over files. Error texts contain only names.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from bigtrain.system.storage.stores import AccessDeniedError

_READ_AGAIN = timedelta(minutes=5)
"""Interval after which credentials are obtained again: keys may be rotated, and roles expire."""
_SIGNING = (
    *("aws_access_key_id", "credential_process", "role_arn"),
    *("sso_session", "sso_start_url", "login_session"),
)


@dataclass(frozen=True)
class AwsProfile:
    """Name of a profile, its settings, and the endpoint of a server other than AWS, if it has
    one."""

    name: str
    settings: Mapping[str, str]
    endpoint: str | None


def read_profile() -> AwsProfile | None:
    """Return the profile that AWS_PROFILE names, or ``default``; None if it does not exist.

    Raises AccessDeniedError for a name that no file has, and for a file that cannot be read.
    """
    import botocore.exceptions
    import botocore.session

    session = botocore.session.Session()
    try:
        profiles, name = session.available_profiles, session.get_config_variable("profile")
        if name is None and "default" not in profiles:
            return None
        if name is not None and name not in profiles:
            names = ", ".join(sorted(profiles)) or "none"
            raise AccessDeniedError(
                f"AWS_PROFILE = {name!r}: neither file of ~/.aws has such a profile -> one of "
                f"these: {names}"
            )
        settings = session.get_scoped_config()
        services = session.full_config.get("services", {}).get(settings.get("services"), {})
    except botocore.exceptions.BotoCoreError as error:  # its text may quote lines of the file
        raise AccessDeniedError(f"~/.aws cannot be read: {type(error).__name__}") from None
    s3_settings = services.get("s3", {})
    endpoint = s3_settings.get("endpoint_url") if isinstance(s3_settings, Mapping) else None
    return AwsProfile(name or "default", settings, endpoint or settings.get("endpoint_url"))


def s3_options() -> dict[str, Any]:
    """Return the profile's settings that no variable overrides, as arguments of
    ``obstore.store.from_url``.

    Raises AccessDeniedError as `read_profile`, and if the profile's credentials are unavailable.
    """
    profile = read_profile()
    if profile is None:
        return {}
    options: dict[str, Any] = {}
    if "region" in profile.settings and not _has("AWS_REGION", "AWS_DEFAULT_REGION"):
        options["region"] = profile.settings["region"]
    ignores_endpoint = os.environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() == "true"
    endpoint_variables = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT")
    if profile.endpoint and not ignores_endpoint and not _has(*endpoint_variables):
        options["endpoint"] = profile.endpoint
    unsigned = os.environ.get("AWS_SKIP_SIGNATURE", "").lower() in ("true", "1")
    # Without credentials in the profile, obstore uses the machine's role.
    has_credentials = any(name in profile.settings for name in _SIGNING)
    has_variables = _has("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE")
    if has_credentials and not unsigned and not has_variables:
        options["credential_provider"] = ProfileCredentials(profile.name)
    return options


def _has(*names: str) -> bool:
    return any(os.environ.get(name) for name in names)


class ProfileCredentials:
    """Credential provider for obstore. The first credentials are obtained at once, so that missing
    ones are detected early; later calls obtain them again."""

    def __init__(self, name: str) -> None:
        """Raise AccessDeniedError if the profile's credentials are unavailable."""
        self._name = name
        self._first: dict[str, Any] | None = self._obtained()

    def __call__(self) -> dict[str, Any]:
        first, self._first = self._first, None
        return self._obtained() if first is None else first

    def _obtained(self) -> dict[str, Any]:
        """Return credentials in obstore's format."""
        import botocore.exceptions
        import botocore.session

        # A new session reads the files again.
        session = botocore.session.Session(profile=self._name)
        try:
            credentials = session.get_credentials()
            if credentials is None:
                raise self._refused("none are found")
            frozen = credentials.get_frozen_credentials()
        except botocore.exceptions.PartialCredentialsError as error:
            raise self._refused(f"{error.kwargs['cred_var']} is missing") from None
        except (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError) as error:
            raise self._refused(type(error).__name__) from None  # its text may contain secrets
        except (OSError, ValueError, KeyError, TypeError) as error:  # of a credential_process
            raise self._refused(f"credential_process: {type(error).__name__}") from None
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(UTC) + _READ_AGAIN,
        }

    def _refused(self, reason: str) -> AccessDeniedError:
        return AccessDeniedError(
            f"profile {self._name} of ~/.aws: no credentials ({reason}) -> aws sts "
            f"get-caller-identity --profile {self._name} (for SSO: aws sso login)"
        )
