"""Errors of the Hugging Face Hub as user errors: what is wrong, and the command that fixes it."""

from __future__ import annotations

import contextlib
import errno
import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mvp_engine.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from mvp_engine.hf.hub import HubRepo


class NoRevision(UserError):
    """The repository has no such branch, tag or commit."""


@contextlib.contextmanager
def hub_errors(repo: HubRepo) -> Iterator[None]:
    """A context in which an error of the Hub about `repo`, or of the way to it, is raised as a `UserError`."""
    errors: Any = importlib.import_module("huggingface_hub.errors")

    try:
        yield
    except errors.GatedRepoError:
        raise UserError(
            f"{repo} is gated: accept its terms at {_page(repo)}, then run `hf auth login` with a token of that "
            "account, or set HF_TOKEN"
        ) from None
    except errors.RevisionNotFoundError:
        raise NoRevision(
            f"{repo}: {repo.name} has no revision {repo.revision}; see {_page(repo)}"
        ) from None
    except errors.HFValidationError as error:
        raise UserError(f"{repo} is no name that the Hub allows: {_first_line(error)}") from None
    except errors.RepositoryNotFoundError:
        raise UserError(_not_found(repo)) from None
    except errors.LocalEntryNotFoundError as error:
        raise UserError(_unreachable(repo, error.__cause__)) from None
    except errors.HfHubHTTPError as error:
        is_refused = error.response is not None and error.response.status_code == 401
        hint = (
            ". The token is not valid: run `hf auth login`, or set HF_TOKEN" if is_refused else ""
        )
        raise UserError(f"{repo}: the Hub answers {_first_line(error)}{hint}") from None
    except (errors.HTTPError, errors.OfflineModeIsEnabled, errors.XetDownloadError) as error:
        raise UserError(_unreachable(repo, error)) from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
            raise UserError(
                f"{repo} cannot be stored in {_cache()}: {error.strerror}. Set HF_HOME to another folder"
            ) from None
        raise


def _unreachable(repo: HubRepo, cause: BaseException | None) -> str:
    from huggingface_hub import constants

    reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the Hub cannot be reached"
    if cause is not None and not constants.HF_HUB_OFFLINE:
        reason += f" ({_first_line(cause)})"
    local = "neither a folder here nor" if repo.kind == "model" else "not"
    return (
        f"{repo} is {local} complete in the cache {_cache()}, and {reason}: run "
        f"`{repo.download_command}` where there is a network, with HF_HOME as here"
    )


def _not_found(repo: HubRepo) -> str:
    what = "neither a folder here nor a model" if repo.kind == "model" else "not a dataset"
    return (
        f"{repo} is {what} of the Hub that you may read.{_similar(repo)} "
        "For a private one, run `hf auth login` or set HF_TOKEN"
    )


def _similar(repo: HubRepo) -> str:
    """A repository of the same owner with a similar name."""
    from huggingface_hub import HfApi

    errors: Any = importlib.import_module("huggingface_hub.errors")

    owner = repo.name.partition("/")[0]
    with contextlib.suppress(errors.HTTPError, OSError):
        api = HfApi()
        found: Any = (api.list_models if repo.kind == "model" else api.list_datasets)(
            author=owner, limit=1000
        )
        return did_you_mean(repo.name, [one.id for one in found])
    return ""


def _page(repo: HubRepo) -> str:
    from huggingface_hub import constants

    folder = "datasets/" if repo.kind == "dataset" else ""
    return f"{constants.ENDPOINT}/{folder}{repo.name}"


def _cache() -> str:
    from huggingface_hub import constants

    return constants.HF_HUB_CACHE


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]
