"""Fingerprints of the code that the plugin leans on."""

import textwrap

import pytest

from shardmill.runtime_patch import plugin, settings
from shardmill.runtime_patch.errors import PatchError
from shardmill.runtime_patch.fingerprint import fingerprint
from shardmill.runtime_patch.ledger import LEDGER, Patch, mismatches

SOURCE = '''
LIMIT = 3

class Attention:
    """A class."""

    def forward(self, x):
        """Says something."""
        return x + LIMIT  # why
'''


def write(folder, source):
    (folder / "code.py").write_text(textwrap.dedent(source))
    return fingerprint(folder, "code.py:Attention.forward")


def test_only_behaviour_counts(tmp_path):
    """Comments, docstrings and blank lines do not change a fingerprint; an operator does."""
    before = write(tmp_path, SOURCE)
    assert fingerprint(tmp_path, "code.py:LIMIT")
    (tmp_path / "b").mkdir()
    (tmp_path / "c").mkdir()
    talk = SOURCE.replace("  # why", "\n").replace("Says something.", "Says it otherwise.")
    assert write(tmp_path / "b", talk) == before
    assert write(tmp_path / "c", SOURCE.replace("x + LIMIT", "x - LIMIT")) != before


@pytest.mark.parametrize(
    "target", ["code.py:Attention.backward", "gone.py:Attention", "code.py:Attention.forward.x"]
)
def test_what_is_gone_has_none(tmp_path, target):
    """A definition or file that no longer exists has no fingerprint."""
    write(tmp_path, SOURCE)
    assert fingerprint(tmp_path, target) is None


def test_mismatch_names_the_patch_and_the_definition(tmp_path):
    """A changed definition is told with its patch, what was found and what was expected."""
    got = write(tmp_path, SOURCE)
    row = Patch(
        "rows", "wrap", "t", "w", "u", "r", {"code.py:Attention.forward": "0" * 16, "code.py:Gone": "1" * 16}
    )
    assert mismatches(tmp_path, (row,)) == [
        f"rows: code.py:Attention.forward is {got}, expected {'0' * 16}",
        f"rows: code.py:Gone is gone, expected {'1' * 16}",
    ]


def test_every_row_is_complete():
    """Each ledger row has a way to be applied, a reason, an end and fingerprints of 16 hex digits."""
    assert {patch.name for patch in LEDGER} == set(plugin.APPLY)
    for patch in LEDGER:
        assert all((patch.target, patch.why, patch.upstream, patch.remove_when, patch.expects))
        assert all(len(value) == 16 and int(value, 16) >= 0 for value in patch.expects.values())


def test_registration_refuses_another_vllm(monkeypatch, caplog):
    """Another vLLM stops the server with what differs; VLLM_KVQ_UNCHECKED=1 makes it a warning."""
    monkeypatch.setattr(
        plugin, "vllm_problems", lambda: ["version 0.34.0, expected 0.33.0", "rows: x is gone"]
    )
    with pytest.raises(PatchError, match=r"version 0\.34\.0.*rows: x is gone.*VLLM_KVQ_UNCHECKED=1"):
        plugin.register()
    assert plugin.applied() == {}
    plugin.check_vllm(settings.Settings(unchecked=True))
    assert "was not checked: version 0.34.0" in caplog.text


def test_registering_twice_applies_once(monkeypatch):
    """vLLM calls the entry point in several places of one process; the second call does nothing."""
    calls = []
    monkeypatch.setattr(plugin, "vllm_problems", list)
    monkeypatch.setattr(plugin, "_applied", {})
    monkeypatch.setattr(
        plugin, "APPLY", {p.name: lambda _, n=p.name: calls.append(n) or "applied" for p in LEDGER}
    )
    plugin.register()
    plugin.register()
    assert calls == [patch.name for patch in LEDGER]
    assert set(plugin.applied().values()) == {"applied"}
