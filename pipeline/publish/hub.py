"""The hub as a publication sees it: listings, uploads and one commit, by huggingface_hub's own calls.

Every failure is a HubError with what the hub says. What a hub means by "not there" is None. The library tries again
what is worth it (5xx, broken connections); a link that has expired is asked for again here.
"""

from __future__ import annotations

import urllib.parse
from collections.abc import Callable, Sequence
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

from shardmill.pipeline.container.ranges import RemoteFile, hub_address
from shardmill.pipeline.publish.answers import HubError, asked, said, status_of
from shardmill.pipeline.publish.counted import counted_addition
from shardmill.pipeline.publish.facts import HubFile, Listing, LocalFile, Place
from shardmill.pipeline.publish.plan import Publication, Step

Advance = Callable[[int], None]
_EXPIRED = (400, 403, 404, 410)  # what storages answer to a link that holds no more
_LINK_TRIES = 3  # an upload link holds for an hour or so; a file that outlasts three of them has no network
_ASKED_AT_ONCE = 256  # objects in one question, the library's own limit


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

        what, missing = f"hf://{repository}", (RepositoryNotFoundError, RevisionNotFoundError)
        try:
            info = asked(what, lambda: self._api.model_info(repository, revision=revision), missing)
            tree = asked(what, lambda: self._tree(repository, info.sha), missing)
        except missing:
            return None
        files = {each.path: _hub_file(each) for each in tree if hasattr(each, "blob_id")}
        return Listing(repository, str(info.sha), files, bool(info.private))

    def _tree(self, repository: str, commit: str) -> list[Any]:
        return list(self._api.list_repo_tree(repository, recursive=True, revision=commit))

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
        what, (repository, branch) = str(self.place), (self.place.repository, self.place.branch)
        if base is None:
            asked(what, lambda: self._api.create_repo(repository, private=private, exist_ok=True))
        if branch != "main":
            asked(what, lambda: self._api.create_branch(repository, branch=branch, exist_ok=True))

    def held(self, files: Sequence[LocalFile]) -> frozenset[str]:
        """The sha256s that the repository's storage holds, under a name or none; asking changes nothing."""
        from huggingface_hub.lfs import UploadInfo

        infos = [UploadInfo(file.bytes, b"", bytes.fromhex(file.sha256)) for file in files if file.bytes]
        held: set[str] = set()
        for begin in range(0, len(infos), _ASKED_AT_ONCE):
            answers = asked(str(self.place), partial(self._batch, infos[begin : begin + _ASKED_AT_ONCE]))
            held |= {answer["oid"] for answer in answers if answer.get("actions") is None}
        return frozenset(held)

    def _batch(self, infos: Sequence[Any]) -> list[dict[str, Any]]:
        """What the LFS storage answers of each object; an `actions` says that it lacks it."""
        from huggingface_hub.lfs import post_lfs_batch_info

        answers, _, _ = post_lfs_batch_info(
            infos,
            token=None,
            repo_type="model",
            repo_id=self.place.repository,
            endpoint=self._api.endpoint,
        )
        return list(answers)

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
        for remaining in reversed(range(_LINK_TRIES)):
            try:
                asked(f"{self.place}: {operation.path_in_repo}", partial(self._upload, operation))
                return
            except HubError as error:
                if not remaining or status_of(error) not in _EXPIRED:
                    raise

    def _upload(self, operation: Any) -> None:
        self._api.preupload_lfs_files(
            self.place.repository,
            [operation],
            revision=self.place.branch,
            num_threads=1,
            free_memory=False,
        )

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
        ask = partial(
            self._api.create_commit,
            self.place.repository,
            operations,
            commit_message=message,
            revision=self.place.branch,
            parent_commit=head,
        )
        try:
            return str(asked(str(self.place), ask, (FileDuplicationError,)).oid)
        except FileDuplicationError as error:
            raise CopyRefusedError(f"{self.place}: {said(error)}") from None

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
