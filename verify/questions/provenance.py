"""The provenance statement: what the manifest says of the making, in the words of in-toto and SLSA.

Derived from the manifest and the version of this program, so that it can be written again and compared. Subjects are
the published files; the parent's revision, its files that were passed on and the recipe's TOML (not in manifest
format 1) are resolved dependencies, each by a cryptographic digest; the recipe's name and its numerics are external
parameters. The xxh3-128 digests of the parent tensors that were changed tell which they were and prove nothing, so they
are internal parameters. It is signed with the files, not by itself.
Forms: https://in-toto.io/Statement/v1, https://slsa.dev/spec/v1.0/provenance; names of packages are package URLs.
"""

from __future__ import annotations

import re
from importlib.metadata import version as version_of
from typing import Any
from urllib.parse import quote

from shardmill.verify.reading.manifest import Manifest, canonical

PROVENANCE = "provenance.intoto.json"
STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://slsa.dev/provenance/v1"
BUILD_TYPE = "pkg:generic/shardmill/build@2"  # the form of the parameters below; a new form gets a new number
BUILDER = "pkg:generic/shardmill"

_VERSION = re.compile(r"[0-9A-Za-z][0-9A-Za-z.+!-]{0,63}")


def statement(manifest: Manifest, version: str) -> dict[str, Any]:
    """The statement, as the given version of this program makes it. Every file must have a sha256."""
    return {
        "_type": STATEMENT,
        "subject": [
            {"name": path, "digest": {"sha256": record.sha256}}
            for path, record in sorted(manifest.files.items())
            if record.sha256 is not None
        ],
        "predicateType": PREDICATE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {"recipe": manifest.recipe, "numerics": list(manifest.numerics)},
                "internalParameters": _internal(manifest),
                "resolvedDependencies": _dependencies(manifest),
            },
            "runDetails": {
                "builder": {"id": f"{BUILDER}@{quote(version)}", "version": {"shardmill": version}},
            },
        },
    }


def statement_bytes(manifest: Manifest, version: str) -> bytes:
    return canonical(statement(manifest, version))


def this_version() -> str:
    """The version of this program that is installed."""
    return version_of("shardmill")


def stated_version(statement: object) -> str | None:
    """The version of the program that a statement says it was made by; None where it says none."""
    try:
        found = statement["predicate"]["runDetails"]["builder"]["version"]["shardmill"]  # type: ignore[index]
    except (KeyError, TypeError, IndexError):
        return None
    return found if isinstance(found, str) and _VERSION.fullmatch(found) else None


def lacks_sha256(manifest: Manifest) -> list[str]:
    """The files for which the manifest states no sha256 (`build --no-sha256`)."""
    return sorted(name for name, record in manifest.files.items() if record.sha256 is None)


def _internal(manifest: Manifest) -> dict[str, Any]:
    sources = {name: digest for shard in manifest.shards.values() for name, digest in shard.sources.items()}
    origins = {name: record.tensors for name, record in manifest.sources.items()}
    return {
        "planKey": manifest.plan_key,
        "sourceTensors": {"xxh3-128": sources},
        **({"origins": origins} if origins else {}),
    }


def _dependencies(manifest: Manifest) -> list[dict[str, Any]]:
    parent = _repository("parent", manifest.parent.get("repository"), manifest.parent.get("revision"))
    sources = [
        dependency
        for name, record in sorted(manifest.sources.items())
        for dependency in _repository(f"source/{name}", record.repository, record.revision)
    ]
    passed_on = [
        {"name": f"parent/{name}", "digest": {"sha256": manifest.files[name].sha256}}
        for name, shard in sorted(manifest.shards.items())
        if not shard.rewritten and name in manifest.files
    ]
    recipe = [{"name": "recipe", "digest": {"sha256": digest}} for digest in manifest.recipe_digests]
    return [*parent, *sources, *recipe, *passed_on]


def _repository(name: str, repository: str | None, revision: str | None) -> list[dict[str, Any]]:
    """A checkpoint on a hub as a dependency, where both are known."""
    if not repository or not revision:
        return []
    uri = f"pkg:huggingface/{quote(repository)}@{quote(revision)}"
    return [{"name": name, "uri": uri, "digest": {"gitCommit": revision}}]
