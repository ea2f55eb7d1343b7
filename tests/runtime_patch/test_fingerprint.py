"""Fingerprints of the code that the plugin leans on."""

import textwrap

import pytest

from shardmill.runtime_patch import plugin
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
