"""The stages, one module each, and the table that names them. To add one: a module and a row.

Stages do not import one another's work: they meet in the plan and in what flows along the DAG.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardmill.pipeline.stages.classify import classify
from shardmill.pipeline.stages.convert import convert
from shardmill.pipeline.stages.dag import Stage
from shardmill.pipeline.stages.dequantize import dequantize
from shardmill.pipeline.stages.index import index
from shardmill.pipeline.stages.input_scales import input_scales
from shardmill.pipeline.stages.quantize import quantize
from shardmill.pipeline.stages.reconcile import reconcile
from shardmill.pipeline.stages.rewrite import rewrite
from shardmill.pipeline.stages.scales import scales
from shardmill.pipeline.stages.scan import scan
from shardmill.pipeline.stages.sources import sources

STAGES: Mapping[str, Stage] = {
    "scan": Stage(scan, produces="parent", scope="checkpoint"),
    "input_scales": Stage(
        input_scales, consumes=("parent",), produces="parent", scope="checkpoint", options=("from", "into")
    ),
    "sources": Stage(sources, consumes=("parent",), produces="parent", scope="checkpoint"),
    "classify": Stage(classify, consumes=("parent",), produces="assignments", scope="checkpoint"),
    "quantize": Stage(quantize, consumes=("pieces",), produces="codes", scope="shard", by_piece=True),
    "scales": Stage(scales, consumes=("codes",), produces="scales", scope="shard"),
    "dequantize": Stage(dequantize, consumes=("pieces",), produces="values", scope="shard", by_piece=True),
    "convert": Stage(convert, consumes=("pieces",), produces="converted", scope="shard", by_piece=True),
    "reconcile": Stage(reconcile, consumes=("pieces",), produces="repairs", scope="shard"),
    "rewrite": Stage(
        rewrite,
        consumes=("pieces", "codes", "scales"),
        accepts=("values", "repairs", "converted"),
        produces="receipt",
        scope="shard",
    ),
    "index": Stage(index, consumes=("parent", "plan", "receipts"), produces="index", scope="checkpoint"),
}
