"""A checkpoint's bill of materials, CycloneDX 1.6: files by sha256, parent, licence, tensors by number format.

The model is one component; its files and its groups of tensors are parts of it. A group is what has one number format
(the words of `verify` for forms), with its count of weights and its bytes, scales included. Nothing in it depends on
when it is written, so that two of one checkpoint are equal. Form: https://cyclonedx.org/docs/1.6/json/
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote
from uuid import NAMESPACE_URL, uuid5

from shardmill.verify.formats.schemes import Linear, quantized
from shardmill.verify.questions.coverage import form_of
from shardmill.verify.questions.provenance import BUILDER, this_version
from shardmill.verify.reading.checkpoint import Checkpoint, open_checkpoint
from shardmill.verify.reading.file_pass import FileJob
from shardmill.verify.reading.source import Folder, read
from shardmill.verify.reading.stream import stream
from shardmill.verify.rules.findings import Finding, Report, printable

README_BYTES_MAX = 64 << 10
_LICENCE = re.compile(r"^license:[ \t]*[\"']?([\w.+-]+)", re.MULTILINE)
SCHEMA = "http://cyclonedx.org/schema/bom-1.6.schema.json"


def bill_of_materials(folder: Path) -> tuple[str, list[Finding]]:
    """The bill as JSON; and the errors that keep it from being complete, of which none may be left out."""
    report = Report("sbom")
    checkpoint = open_checkpoint(Folder(folder), report)
    faults = [finding for finding in report.findings if finding.severity == "error"]
    results = stream(
        checkpoint.source, [FileJob(name, size, True, ()) for name, size in checkpoint.files.items()]
    )
    faults += [finding for result in results.values() for finding in result.findings]
    digests = {name: result.sha256 for name, result in results.items()}
    return json.dumps(_bill(folder.resolve().name, checkpoint, digests), indent=2), faults


def _bill(name: str, checkpoint: Checkpoint, digests: Mapping[str, str]) -> dict[str, Any]:
    model = _model(name, checkpoint)
    parts = [*_files(checkpoint, digests), *_groups(checkpoint)]
    serial = uuid5(NAMESPACE_URL, json.dumps(sorted(digests.items())))
    version = this_version()
    tool = {"type": "application", "name": "shardmill", "version": version, "purl": f"{BUILDER}@{version}"}
    return {
        "$schema": SCHEMA,
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{serial}",
        "version": 1,
        "metadata": {"tools": {"components": [tool]}, "component": model},
        "components": parts,
        "dependencies": [{"ref": "model", "dependsOn": [part["bom-ref"] for part in parts]}],
    }


def _model(name: str, checkpoint: Checkpoint) -> dict[str, Any]:
    config, manifest = checkpoint.config, checkpoint.manifest
    architectures = config.get("architectures")
    parameters = {
        "architectureFamily": config.get("model_type"),
        "modelArchitecture": architectures[0] if isinstance(architectures, list) and architectures else None,
    }
    model: dict[str, Any] = {
        "type": "machine-learning-model",
        "bom-ref": "model",
        "name": name,
        "modelCard": {
            "modelParameters": {key: said for key, said in parameters.items() if isinstance(said, str)}
        },
    }
    if licence := _licence(checkpoint):
        model["licenses"] = [{"license": {"name": licence}}]
    repository = manifest.parent.get("repository") if manifest is not None else None
    if manifest is not None and repository:
        revision = manifest.parent.get("revision")
        purl = f"pkg:huggingface/{quote(repository)}" + (f"@{quote(revision)}" if revision else "")
        ancestor = {"type": "machine-learning-model", "name": repository, "purl": purl}
        model["pedigree"] = {"ancestors": [ancestor | ({"version": revision} if revision else {})]}
    return model


def _licence(checkpoint: Checkpoint) -> str | None:
    """What the front matter of README.md names."""
    size = checkpoint.files.get("README.md")
    if not size:
        return None
    head = read(checkpoint.source, "README.md", 0, min(size, README_BYTES_MAX)).decode(errors="replace")
    front = head.split("\n---", 1)[0] if head.startswith("---\n") else ""
    found = _LICENCE.search(front)
    return printable(found[1]) if found else None


def _files(checkpoint: Checkpoint, digests: Mapping[str, str]) -> list[dict[str, Any]]:
    return [
        {
            "type": "file",
            "bom-ref": f"file:{quote(name)}",
            "name": name,
            "hashes": [{"alg": "SHA-256", "content": digests[name]}],
            "properties": [{"name": "shardmill:bytes", "value": str(size)}],
        }
        for name, size in sorted(checkpoint.files.items())
    ]


def _groups(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """A component for each number format, with its weights, its tensors and their bytes."""
    linears = quantized(checkpoint.tensors)
    weights: dict[str, int] = defaultdict(int)
    tensors: dict[str, int] = defaultdict(int)
    bytes_: dict[str, int] = defaultdict(int)
    owners = _owners(linears)
    for tensor in checkpoint.tensors.values():
        linear = owners.get(tensor.name)
        form = form_of(linear.weight if linear and linear.weight else tensor, checkpoint.tensors, linear)
        weights[form] += linear is None or tensor is linear.weight
        tensors[form] += 1
        bytes_[form] += tensor.bytes
    return [
        {
            "type": "data",
            "bom-ref": f"tensors:{quote(form)}",
            "name": f"tensors: {form}",
            "data": [{"type": "other", "name": form}],
            "properties": [
                {"name": "shardmill:number-format", "value": form},
                {"name": "shardmill:weights", "value": str(weights[form])},
                {"name": "shardmill:tensors", "value": str(tensors[form])},
                {"name": "shardmill:bytes", "value": str(bytes_[form])},
            ],
        }
        for form in sorted(tensors)
    ]


def _owners(linears: Mapping[str, Linear]) -> dict[str, Linear]:
    """Tensor -> the weight that it is, or whose scales and tables it belongs to."""
    return {
        tensor.name: linear
        for linear in linears.values()
        for tensor in (linear.weight, *linear.scales.values(), *linear.extras.values())
        if tensor is not None
    }
