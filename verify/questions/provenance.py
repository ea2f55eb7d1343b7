"""The provenance statement: what the manifest says of the making, in the words of in-toto and SLSA.

Derived from the manifest alone, so that it can be written again and compared. Subjects are the published files with
their sha256; the parent's revision, the recipe's TOML (not in manifest format 1) and the digests of the tensors that
were converted are resolved dependencies; the recipe's name and its numerics are external parameters. It is signed
with the files, not by itself.
"""

from __future__ import annotations

from typing import Any

from shardmill.verify.reading.manifest import Manifest, canonical

PROVENANCE = "provenance.intoto.json"
STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://slsa.dev/provenance/v1"
BUILD_TYPE = "shardmill/build/1"


def statement(manifest: Manifest) -> dict[str, Any]:
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
                "internalParameters": {"planKey": manifest.plan_key},
                "resolvedDependencies": _dependencies(manifest),
            },
            "runDetails": {"builder": {"id": "shardmill"}},
        },
    }


def statement_bytes(manifest: Manifest) -> bytes:
    return canonical(statement(manifest))


def _dependencies(manifest: Manifest) -> list[dict[str, Any]]:
    repository, revision = manifest.parent.get("repository"), manifest.parent.get("revision")
    parent: dict[str, Any] = {"name": "parent"}
    if repository:
        parent["uri"] = f"hf://{repository}" + (f"@{revision}" if revision else "")
    if revision:
        parent["digest"] = {"gitCommit": revision}
    sources = {name: digest for shard in manifest.shards.values() for name, digest in shard.sources.items()}
    tensors = [{"name": name, "digest": {"xxh3-128": digest}} for name, digest in sorted(sources.items())]
    recipe = [{"name": "recipe", "digest": {"sha256": digest}} for digest in manifest.recipe_digests]
    return [parent, *recipe, *tensors]
