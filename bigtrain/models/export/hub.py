"""Upload of an exported directory to the Hugging Face hub or a compatible server (HF_ENDPOINT).
The token is found by huggingface_hub and never printed."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError
from huggingface_hub.utils import (
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
    validate_repo_id,
)

from bigtrain.errors import ConfigError, OutputError, Problem, one_line

_OPTION = "--push-to-hub"


def refuse_unreachable(repository: str) -> None:
    """Check before an export whether `repository` can be written, as far as possible without
    writing: its name, the network, the login. Raises ConfigError, with what to do."""

    def refused(rule: str, remedy: str) -> ConfigError:
        return ConfigError(Problem(_OPTION, repository, rule, remedy))

    command = f"hf upload {repository} DIRECTORY"
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise refused("is not a repository name", "OWNER/NAME, such as me/my-model") from error
    if constants.HF_HUB_OFFLINE:
        rule = "HF_HUB_OFFLINE is set, so nothing may be sent"
        raise refused(rule, f"unset it, or export without, and later: {command}")
    try:
        HfApi().whoami()
    except LocalTokenNotFoundError as error:
        raise refused("not logged in", "hf auth login, or set HF_TOKEN") from error
    except HfHubHTTPError as error:
        rule = f"{constants.ENDPOINT} answers {error.response.status_code} to the login"
        raise refused(rule, "hf auth login, or HF_TOKEN, with a token that may write") from error
    except Exception as error:  # the client's transport errors differ between its versions
        rule = f"{constants.ENDPOINT} cannot be reached: {type(error).__name__}"
        raise refused(rule, f"export without, and later: {command}") from error


def push_to_hub(directory: Path, repository: str, *, private: bool, message: str) -> str:
    """Push the files of `directory` as one commit to `repository`, which is created if missing;
    return its address. Other files of the repository stay. Raises OutputError if the hub does not
    accept the files; the directory does not change."""
    are_shown = not are_progress_bars_disabled()
    disable_progress_bars()
    try:
        address = HfApi().create_repo(repository, private=private, exist_ok=True)
        HfApi().upload_folder(
            repo_id=address.repo_id, folder_path=directory, commit_message=message
        )
    except Exception as error:  # as above
        reason = one_line(error)
        raise OutputError(
            f"{directory} is written and verified, and was not pushed to {repository}: {reason} "
            f"-> hf upload {repository} {directory}"
        ) from error
    finally:
        if are_shown:
            enable_progress_bars()
    return str(address)
