"""The plugin in a vLLM that serves something else: what it costs, and that it cannot stop it."""

import pytest

CPU_SECONDS, MEMORY_KIB = 0.2, 5 << 10


def test_an_ordinary_process_pays_next_to_nothing(look):
    """Loading the plugin takes 0.2 s of CPU and 5 MiB at most, imports no model and leaves compile caches warm."""
    report = look({}, module="cost_probe")
    assert "error" not in report, report["error"]
    print({name: report[name] for name in ("cpu_seconds", "memory_kib")}, len(report["modules"]))
    assert [name for name in report["modules"] if name.startswith(("vllm", "torch"))] == []
    assert report["factors"] == []
    assert report["cuda"] is False
    assert report["memory_kib"] <= MEMORY_KIB
    assert report["cpu_seconds"] <= CPU_SECONDS


@pytest.mark.parametrize("other", ["version", "source"])
def test_another_vllm_serves_other_models(parent, child, look, other):
    """Under vLLM 0.33.1, or with a changed source file, an NVFP4 checkpoint starts and ours is refused."""
    report = look({"pretend": other, "checkpoint": str(parent)}, module="cost_probe")
    assert report.get("quant_config") == "ModelOptNvFp4Config", report
    report = look({"pretend": other, "checkpoint": str(child)}, module="cost_probe")
    expected = "version 0.33.1, expected 0.33.0" if other == "version" else "compile_factors"
    assert report["error"].startswith("PatchError")
    assert expected in report["error"]


def test_our_checkpoint_brings_the_plugin(child, look):
    """Ours is recognized by its config alone, without any variable."""
    report = look({"checkpoint": str(child)}, module="cost_probe")
    assert report.get("quant_config") == "MixedPrecisionConfig", report


def test_a_piecewise_capture_keeps_the_indexer_for_its_replays(look):
    """vLLM's own break point: captured without metadata, the indexer is called again when the graph is replayed."""
    report = look({}, module="capture_probe")
    assert report == {"breaks": 1, "captured": ["reserve"], "replayed": ["index"]}
