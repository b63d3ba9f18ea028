"""What the audit's tasks do with the files of an archive: they run on executors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from busrep.spark.archive_rows import DamagedFile, read_file
from busrep.spark.archive_store import Root
from busrep.spark.archived import DataFile, Manifest
from busrep.spark.audit_sums import Row, Sums, hashes_of

_Entry = tuple[Manifest, DataFile]


def summing(root: Root, stream: str, empty: Sums) -> Callable[[_Entry], tuple[list[Any], int, list[dict[str, Any]]]]:
    """The sums of one file, how many rows were left out, and what is wrong with it."""

    def work(entry: _Entry) -> tuple[list[Any], int, list[dict[str, Any]]]:
        manifest, file = entry
        sums, findings = attrs.evolve(empty, found={}), []
        within = Sums(2**63, manifest.after, manifest.upto)
        try:
            for batch in read_file(root, stream, file):
                sums.add(batch)
                strangers = within.strangers(batch)
                if strangers:
                    writer, token = strangers[0]
                    text = f"{file.file}: row of writer {writer}, token {token}, is not in what {manifest.name} says"
                    findings.append({"kind": "positions", "file": file.file, "text": text})
        except FileNotFoundError as error:
            findings.append({"kind": "no file", "file": file.file, "text": str(error)})
        except DamagedFile as error:
            findings.append({"kind": "file", "file": file.file, "text": f"{file.file}: {error}"})
        return sums.result(), sums.outside, findings

    return work


def picking(root: Root, stream: str, low: Mapping[str, int], high: Mapping[str, int]) -> Callable[[_Entry], list[Row]]:
    """The rows of one file that are of these writers and tokens; what can be read of it."""

    def work(entry: _Entry) -> list[Row]:
        found: list[Row] = []
        try:
            for batch in read_file(root, stream, entry[1]):
                columns = (batch.column(name).to_pylist() for name in ("writer", "token", "index"))
                found += [
                    row for row in zip(*columns, hashes_of(batch), strict=True)
                    if row[0] in low and low[row[0]] < row[1] <= high[row[0]]
                ]  # fmt: skip
        except (DamagedFile, FileNotFoundError):
            pass  # it is among the findings
        return found

    return work
