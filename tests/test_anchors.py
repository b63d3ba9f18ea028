"""A piece of code is found where its definition went, and replaced as it is indented there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.anchors import AnchorError, find, index, replacement

CODE = """\
class Ledger:
    @property
    def floor(self) -> int:
        return self._floor

    @floor.setter
    def floor(self, value: int) -> None:
        self._floor = value

    def commit(self) -> None:
        if self.open:
            # Why it does so.
            self.send(self.first, self.last)  # both
            self.note("SELECT 1 FROM facts")
        self.close()
"""


def replaced(text: str, old: str, new: str) -> str:
    start, end, instead = replacement(text, old, new)
    return text[:start] + instead + text[end:]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("    self.close()\n", "    self.end()\n", "        self.end()\n"),
        ("self.close()", "self.end()", "        self.end()\n"),
        ("self.close()\n", "if self:\n    self.end()\n", "        if self:\n            self.end()\n"),
        (
            "if self.open:\n    self.send(\n        self.first,\n        self.last)\n",
            "if not self.open:\n    pass\n",
            '        if not self.open:\n            pass\n            self.note("SELECT 1 FROM facts")\n',
        ),
        ("self.first, self.last", "self.first", "            self.send(self.first)  # both\n"),
        ("SELECT 1 FROM facts", "SELECT 0", '            self.note("SELECT 0")\n'),
    ],
    ids=["a line", "without its end", "one becomes two", "wrapped, without comments", "a part", "in a string"],
)
def test_code_is_compared_by_its_tokens_and_replaced_as_it_is_indented(old: str, new: str, expected: str) -> None:
    assert expected in replaced(CODE, old, new)


def test_whole_lines_leave_nothing_behind() -> None:
    assert "both" not in replaced(CODE, "self.send(self.first, self.last)\n", "")
    assert replaced(CODE, 'self.note("SELECT 1 FROM facts")\n', "") == CODE.replace(
        '            self.note("SELECT 1 FROM facts")\n', ""
    )


@pytest.mark.parametrize(
    ("old", "trouble"),
    [("self.missing()", "found 0 times"), ("self._floor", "found 2 times"), ("# Why it does so.", "found 0 times")],
)
def test_what_is_not_there_once_is_refused(old: str, trouble: str) -> None:
    with pytest.raises(AnchorError, match=trouble):
        replacement(CODE.replace("# Why it does so.", "# Another reason."), old, "pass")


def test_a_definition_is_found_wherever_it_is(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "writing.py").write_text('LIMIT: int = 3\n\n\n@decorated\nasync def commit():\n    "ü"\n')
    (tmp_path / "ledger.py").write_text(CODE)
    found = index(tmp_path)
    assert find(found, "Ledger.commit").name == "ledger.Ledger.commit"
    assert find(found, "b.writing.commit").path.name == "writing.py"
    limit, function = find(found, "LIMIT"), find(found, "writing.commit")
    text = limit.path.read_text()
    assert text[limit.start : limit.end] == "LIMIT: int = 3\n"
    assert text[function.start : function.end].startswith("@decorated")
    assert text[function.start : function.end].endswith('"ü"\n')
    floor = find(found, "Ledger.floor")
    assert CODE[floor.start : floor.end].count("def floor") == 2
    with pytest.raises(AnchorError, match=r"2 definitions are called commit: a\.b\.writing\.commit, ledger"):
        find(found, "commit")
    with pytest.raises(AnchorError, match="0 definitions are called Ledger.redeem"):
        find(found, "Ledger.redeem")
