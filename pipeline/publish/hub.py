"""The hub as a publication sees it: listings, uploads and one commit, by huggingface_hub's own calls.

Every failure is a ShardmillError with the hub's first line. What a hub means by "not there" is None. The library
retries what is worth it (429, 5xx, broken connections); a link that has expired is asked for again here.
"""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Any

from shardmill.pipeline.container.ranges import RemoteFile, hub_address
from shardmill.pipeline.errors import ShardmillError
from shardmill.pipeline.publish.counted import counted_addition
from shardmill.pipeline.publish.facts import HubFile, Listing, LocalFile, Place
from shardmill.pipeline.publish.plan import Publication, Step

Advance = Callable[[int], None]
_LINK_TRIES = 3  # an upload link holds for an hour or so; a file that outlasts three of them has no network
_ASKED_AT_ONCE = 256  # objects in one question, the library's own limit


class HubError(ShardmillError):
    """The hub can't be asked, or says no."""


class CopyRefusedError(HubError):
    """The hub does not copy between these repositories, which may be in two storage regions."""


class Hub:
    """The hub that HF_ENDPOINT names."""

    def __init__(self, place: Place) -> None:
        """Raises HubError where huggingface_hub is not installed, or is too old to copy between repositories."""
        self.place = place
        try:
            from huggingface_hub import CommitOperationCopy, HfApi
        except ImportError:
            raise HubError(f"{place}: needs huggingface_hub; pip install huggingface_hub") from None
        if "src_repo_id" not in signature(CommitOperationCopy).parameters:
            raise HubError(f"{place}: needs a newer huggingface_hub; pip install --upgrade huggingface_hub")
        self._api = HfApi(endpoint=hub_address(), library_name="shardmill")

    def head(self) -> Listing | None:
        """The branch as it is now; None where there is no such repository or branch."""
        return self.listing(self.place.repository, self.place.branch)

    def listing(self, repository: str, revision: str | None) -> Listing | None:
        """A repository at a revision; None where the hub shows none of it."""
        from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

        with _told(f"hf://{repository}"):
            try:
                info = self._api.model_info(repository, revision=revision)
                tree = list(self._api.list_repo_tree(repository, recursive=True, revision=info.sha))
            except (RepositoryNotFoundError, RevisionNotFoundError):
                return None
        files = {each.path: _hub_file(each) for each in tree if hasattr(each, "blob_id")}
        return Listing(repository, str(info.sha), files, bool(info.private))

    def small_file(self, listing: Listing, name: str) -> bytes:
        """The bytes of a file of a repository."""
        base = f"{self._api.endpoint}/{listing.repository}/resolve/{listing.commit}"
        size = listing.files[name].bytes
        data = bytearray(size)
        with RemoteFile(f"{base}/{urllib.parse.quote(name)}", size) as source:
            source.read_into(memoryview(data), 0)
        return bytes(data)

    def create(self, base: Listing | None, private: bool) -> None:
        """Makes the repository, where there is none (`base` is None), and the branch, which begins as main is."""
        with _told(str(self.place)):
            if base is None:
                self._api.create_repo(self.place.repository, private=private, exist_ok=True)
            if self.place.branch != "main":
                self._api.create_branch(self.place.repository, branch=self.place.branch, exist_ok=True)

    def held(self, files: Sequence[LocalFile]) -> frozenset[str]:
        """The sha256s that the repository's storage holds, under a name or none; asking changes nothing."""
        from huggingface_hub.lfs import UploadInfo, post_lfs_batch_info

        infos = [UploadInfo(file.bytes, b"", bytes.fromhex(file.sha256)) for file in files if file.bytes]
        held: set[str] = set()
        with _told(str(self.place)):
            for begin in range(0, len(infos), _ASKED_AT_ONCE):
                answers, _, _ = post_lfs_batch_info(
                    infos[begin : begin + _ASKED_AT_ONCE],
                    token=None,
                    repo_type="model",
                    repo_id=self.place.repository,
                    endpoint=self._api.endpoint,
                )
                held |= {answer["oid"] for answer in answers if answer.get("actions") is None}
        return frozenset(held)

    def addition(self, folder: Path, file: LocalFile, advance: Advance = lambda count: None) -> Any:
        """The library's operation for a file, with the sha256 that is known. `advance` hears of bytes as they go."""
        operation = counted_addition(file.name, folder / file.name, advance)
        operation.upload_info.sha256 = bytes.fromhex(file.sha256)
        return operation

    def held_addition(self, file: LocalFile) -> Any:
        """The operation for a file whose bytes the hub holds, and no disk: as the library leaves one it has sent."""
        from huggingface_hub import CommitOperationAdd
        from huggingface_hub.lfs import UploadInfo

        operation = CommitOperationAdd(file.name, b"")
        operation.upload_info = UploadInfo(file.bytes, b"", bytes.fromhex(file.sha256))
        operation._upload_mode, operation._is_uploaded = "lfs", True
        return operation

    def upload(self, operation: Any) -> None:
        """Sends a large file, unless the hub holds it; a small one goes with the commit."""
        name = operation.path_in_repo
        for remaining in reversed(range(_LINK_TRIES)):
            try:
                with _told(f"{self.place}: {name}"):
                    self._api.preupload_lfs_files(
                        self.place.repository,
                        [operation],
                        revision=self.place.branch,
                        num_threads=1,
                        free_memory=False,
                    )
                return
            except HubError as error:
                if not remaining or not _is_expired(error):
                    raise

    def commit(self, plan: Publication, additions: Sequence[Any], head: str, message: str) -> str:
        """All of the plan in one commit upon `head`; its hash. Raises HubError where the branch has moved on."""
        from huggingface_hub import CommitOperationDelete
        from huggingface_hub.errors import FileDuplicationError

        added = {operation.path_in_repo: operation for operation in additions}
        operations: list[Any] = [CommitOperationDelete(file.name, is_folder=False) for file in plan.deleted]
        for step in plan.steps:
            if step.way == "copy":
                operations.append(self._copy(step))
            elif step.way != "keep":
                operations.append(added[step.file.name])
        with _told(str(self.place)):
            try:
                made = self._api.create_commit(
                    self.place.repository,
                    operations,
                    commit_message=message,
                    revision=self.place.branch,
                    parent_commit=head,
                )
            except FileDuplicationError as error:
                raise CopyRefusedError(f"{self.place}: {_said(error)}") from None
        return str(made.oid)

    def _copy(self, step: Step) -> Any:
        from huggingface_hub import CommitOperationCopy

        source = step.source
        assert source is not None, f"{step.file.name} is copied from nowhere"
        elsewhere = source.repository != self.place.repository
        return CommitOperationCopy(
            source.name,
            step.file.name,
            src_revision=source.commit,
            src_repo_id=source.repository if elsewhere else None,
            src_repo_type="model" if elsewhere else None,
        )


def _hub_file(each: Any) -> HubFile:
    large = each.lfs
    size = large.size if large else each.size
    return HubFile(
        each.path, size, large.sha256 if large else None, each.blob_id, bool(large and each.xet_hash)
    )


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Turns whatever the library raises (many kinds, of several libraries) into one sentence."""
    try:
        yield
    except (ShardmillError, KeyboardInterrupt):
        raise
    except Exception as error:
        raise HubError(f"{what}: the hub answers: {_said(error)}{_advice(error)}") from error


def _said(error: BaseException) -> str:
    """What the deepest cause says, on one line, without the signature that an address might hold."""
    deepest = error
    while deepest.__cause__ is not None:
        deepest = deepest.__cause__
    text = " ".join(str(deepest).split()) or type(deepest).__name__
    return re.sub(r"\?\S+", "?...", text)[:300]


def _advice(error: BaseException) -> str:
    status = _status(error)
    if status in (401, 403):
        return "; log in with a token that may write there (`hf auth login`)"
    if status in (409, 412):
        return "; somebody else has committed meanwhile: run the same command again"
    return "; run the same command again: what was sent is not sent again"


def _status(error: BaseException) -> int | None:
    found: BaseException | None = error
    while found is not None:
        if (response := getattr(found, "response", None)) is not None:
            return int(response.status_code)
        found = found.__cause__
    return None


def _is_expired(error: HubError) -> bool:
    return _status(error) in (400, 403, 404, 410)
