"""`verify loads`, which imports no vLLM, agrees with the real loader on a dozen broken checkpoints."""

from shardmill.verify.questions.loads import loads
from shardmill.verify.reading.source import Folder
from shardmill.verify.rules.findings import Severity
from tests.runtime_patch.vllm import broken


def test_the_judge_agrees_with_the_loader(child, look, tmp_path):
    """What the patched vLLM refuses, or loads without filling a parameter, the judge refuses; the rest it passes."""
    (tmp_path / "broken").mkdir()
    made = broken.make(child, tmp_path / "broken")
    report = look({"checkpoints": [str(folder) for folder in made.values()]}, module="loads_probe")
    assert "error" not in report, report["error"]
    disagreed = []
    for name, folder in made.items():
        loader = report[str(folder)]
        found = loads(Folder(folder), "patched").findings
        judge = [f"{f.slug}: {f.tensor}" for f in found if f.severity == Severity.ERROR]
        print(f"{name}: loader {loader and loader[:120]!r}; judge {judge[:2]}")
        if (loader is None) != (not judge):
            disagreed.append(name)
    assert report[str(made["nothing"])] is None
    assert disagreed == []
