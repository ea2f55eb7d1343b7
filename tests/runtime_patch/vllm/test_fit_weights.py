"""`verify fit` counts the weights of a rank to the byte as the real vLLM 0.33.0 holds them, patched for our build."""

from __future__ import annotations

import pytest

from shardmill.verify.fit.headers import read_facts
from shardmill.verify.reading.source import Folder
from tests.runtime_patch.vllm.conftest import Case


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_weights_of_a_rank_are_those_of_the_real_model(child, tmp_path, ranks):
    job = {"checkpoint": str(child), "draft": True, "ranks": ranks, "meeting": str(tmp_path / "meeting")}
    running = []
    for rank in range(ranks):
        folder = tmp_path / str(rank)
        folder.mkdir()
        case = Case(job | {"rank": rank}, module="weights_probe", environment={"FAKE_DEVICE": "meta"})
        running.append(case.start(folder))
    facts = read_facts(Folder(child))
    main = facts.weights(ranks, draft=False, vision=True).total
    both = facts.weights(ranks, draft=True, vision=True).total
    for one in running:
        report = one.report()
        assert "error" not in report, report
        assert sum(report["main"].values()) == main
        assert sum(report["draft"].values()) == both - main
