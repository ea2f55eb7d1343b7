"""`verify fit` plans 426 random models of 25 families and 23 published ones as the real vLLM 0.33.0 does, by a record.

`make vllm-test` asks the real planner afresh; `python -m tests.runtime_patch.vllm.fit_record` writes the record.
"""

from __future__ import annotations

from collections import Counter

import pytest

from shardmill.verify.fit.families import FAMILIES
from shardmill.verify.fit.preset import KV_DTYPES
from tests.runtime_patch.vllm import fit_record
from tests.runtime_patch.vllm.fit_cases import CARDS, cases

CASES = cases()
RECORD = fit_record.read_record()


def asked() -> list[dict[str, object]]:
    return [case for case in CASES if "error" not in RECORD.get(str(case["index"]), {"error": ""})]


@pytest.mark.parametrize("family", sorted({case["family"] for case in CASES}))
def test_every_plan_of_a_family_is_vllms_or_refused_by_name(family: str) -> None:
    for case in asked():
        if case["family"] != family:
            continue
        found, mine = RECORD[str(case["index"])], fit_record.ours(case)
        if isinstance(mine, str):
            assert "planned" in mine
        else:
            assert mine == {name: found[name] for name in fit_record.COMPARED}, case["index"]


def test_what_vllm_cannot_serve_is_refused_by_name() -> None:
    failed = [case for case in CASES if "error" in RECORD.get(str(case["index"]), {})]
    assert len(failed) >= 9
    for case in failed:
        mine = fit_record.ours(case)
        assert isinstance(mine, str), case["index"]
        assert "planned" in mine


def test_the_record_is_of_these_cases() -> None:
    assert all(RECORD[str(case["index"])]["case"] == fit_record.key_of(case) for case in asked())


def test_the_record_covers_families_cards_and_cache_dtypes() -> None:
    found = asked()
    assert len(found) >= 200
    assert len({case["family"] for case in found}) >= 15
    assert {case["preset"]["sm"] for case in found} == set(CARDS)
    assert {case["preset"]["kv_dtype"] for case in found} == set(KV_DTYPES)
    refused = Counter(case["family"] for case in found if isinstance(fit_record.ours(case), str))
    assert set(refused) == {"glm5_next"}


def test_the_docs_show_the_table_of_the_record() -> None:
    assert fit_record.in_docs() == fit_record.table()


def test_every_family_that_is_planned_was_compared_or_is_a_name_of_one_that_was() -> None:
    compared = {case["config"].get("text_config", case["config"])["model_type"] for case in asked()}
    aliases = {"kimi_k2": "deepseek_v3", "glm5_next": "glm5_next_text", "qwen2_5_vl": "qwen2_5_vl_text"}
    assert {aliases.get(kind, kind) for kind in FAMILIES} <= compared
