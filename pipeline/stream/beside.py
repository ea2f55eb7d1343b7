"""What a build into a hub shows beside the shards: config, README, index, manifest, and what is carried."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardmill.pipeline.manifest.records import MANIFEST_FILE, FileRecord, Receipt
from shardmill.pipeline.publish.facts import LocalFile
from shardmill.pipeline.publish.local import local_file
from shardmill.pipeline.run.beside import copied, small_files
from shardmill.pipeline.run.digests import steadily
from shardmill.pipeline.run.manifest import manifest_of
from shardmill.pipeline.stages.job import Products
from shardmill.pipeline.stream.shards import Workshop


def stage_beside(shop: Workshop, receipts: Sequence[Receipt]) -> list[LocalFile]:
    """Everything beside the shards, written into the staging folder: the manifest, the last, describes the rest."""
    prepared = shop.prepared
    names = prepared.dag.after_shards()
    made = Products(**prepared.products, receipts=receipts)
    products = prepared.dag.run("checkpoint", names, prepared.checkpoint, made)
    small = small_files(prepared.plan, products["index"])
    for name, data in small.items():
        shop.store.stage(name, data)
    files = [local_file(shop.store.staging, name, None) for name in small]
    files += [_carried(shop, name) for name in prepared.plan.carried]
    records = {
        **{receipt.file: FileRecord(receipt.file_bytes, receipt.sha256) for receipt in receipts},
        **{file.name: FileRecord(file.bytes, file.sha256) for file in files},
    }
    manifest = manifest_of(prepared, shop.settings, records, receipts)
    shop.store.stage(MANIFEST_FILE, manifest.to_json())
    return [*files, local_file(shop.store.staging, MANIFEST_FILE, None)]


def _carried(shop: Workshop, name: str) -> LocalFile:
    parent, staged = shop.prepared.parent, shop.store.staging / name
    staged.parent.mkdir(parents=True, exist_ok=True)
    digest, _ = steadily(parent.folder / name, parent.stats[name], lambda opened: copied(opened, staged))
    return local_file(shop.store.staging, name, digest)


def send_beside(shop: Workshop, file: LocalFile) -> Any:
    """The library's operation for a staged file; a large one is sent."""
    operation = shop.hub.addition(shop.store.staging, file)
    shop.hub.upload(operation)
    return operation
