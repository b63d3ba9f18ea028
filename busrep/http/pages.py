"""What travels in catch-up over HTTP: pages of rows, and what is known of writers. Pure, both directions side by side.

A page is the JSON object of protocol.md, section 8, ``{"updates": [[token, row], ...], "upto_token": N, "limited":
bool}``, with a line break between two updates, its epoch, and the question that it answers: also an empty page proves
something, and whatever stands between the two may hand out the answer to another question. A row as it is kept
(compact JSON) holds no line break, so the reader cuts the rows out of the text, byte for byte as the table has them,
and makes no objects of them but to see that each is JSON. A page laid out otherwise (a foreign server's, or one that
a proxy has rewritten) is decoded and its rows are written anew; the two ways agree on what they take and refuse.

Nothing that a server says is believed without a look: whatever is wrong raises ValueError, which says what.
"""

from __future__ import annotations

import math
import re
import secrets
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, TypeGuard

import attrs
import orjson

from busrep.core.catchup import FetchUpdates, UpdatesPage
from busrep.core.fields import INT64_MAX, json_bytes, refuse_name
from busrep.stores.interface import KnownWriter

UPDATES_PATH = "/replication/get_repl_stream_updates/"
STATE_PATH = "/replication/v1/state"
# A snapshot's agreement, by stream, and a part of its text, by the agreement's digest and the part's number.
SNAPSHOTS_PATH = "/replication/v1/snapshots/"
PART_PATH = "/replication/v1/snapshot_parts/"
REFERENCE_PATH = "/_synapse/replication/get_repl_stream_updates/"

# The version in STATE_PATH and in its answer; another one means that a reader has to be updated.
STATE_VERSION = 1

_HEAD, _BETWEEN, _END = b'{"updates":[[', b"],\n[", b"]],\n"
_EPOCH = re.compile(r"[0-9a-f]{32}")
# Stands between rows that are looked at together, and must be found between them: so ``1],[2`` is not taken for a row.
# No server can know it.
_MARK = secrets.randbelow(9 * 10**8) + 10**8
_MARK_BETWEEN = b",%d," % _MARK

_Updates = tuple[list[Any], Sequence[bytes], dict[str, Any]]  # tokens, payloads, the other keys


# -- pages ----------------------------------------------------------------------------------------------------


def bounded(page: UpdatesPage, most_bytes: int) -> UpdatesPage:
    """The page, cut behind the last whole fact that fits into so many bytes of rows; one whole fact at least (9.10)."""
    ends = list(accumulate(map(len, page.payloads)))
    if not ends or ends[-1] <= most_bytes:
        return page
    tokens, cut = page.tokens, bisect_right(ends, most_bytes)
    while cut > 0 and tokens[cut] == tokens[cut - 1]:
        cut -= 1
    if cut == 0:  # the first fact alone is larger
        cut = bisect_right(tokens, tokens[0])
    if cut == len(tokens):
        return page
    return attrs.evolve(
        page, tokens=tokens[:cut], payloads=page.payloads[:cut], upto=tokens[cut - 1], limited=True
    )  # fmt: skip


def write_page(page: UpdatesPage, *, reference: bool = False) -> bytes:
    """The answer to a question. ``reference``: with exactly the three keys of the reference system."""
    rest: dict[str, Any] = {"upto_token": page.upto, "limited": page.limited}
    if not reference:
        rest |= {"epoch": page.epoch, **_question(page)}
    tail = orjson.dumps(rest)[1:]
    if not page.tokens:
        return b'{"updates":[],' + tail
    entries = [b"%d,%b" % entry for entry in zip(page.tokens, page.payloads, strict=True)]
    return b"".join((_HEAD, _BETWEEN.join(entries), _END, tail))


def _question(asked: FetchUpdates | UpdatesPage) -> dict[str, Any]:
    """What a page says of the question, in the question's own words."""
    return {"stream": asked.stream, "instance_name": asked.writer, "from_token": asked.after}


def read_page(body: bytes, asked: FetchUpdates) -> UpdatesPage:
    """The page that answers ``asked``. Raises ValueError for whatever cannot be an honest answer to it."""
    tokens, payloads, rest = cut_out(body) or decoded(body)
    upto, limited = _end_of(tokens, rest)
    if not asked.after <= upto <= asked.upto:
        raise ValueError(f"upto_token {upto} is not within [{asked.after}, {asked.upto}]")
    if tokens and not asked.after < tokens[0] <= tokens[-1] <= upto:
        raise ValueError(f"tokens {tokens[0]} to {tokens[-1]} are not within ({asked.after}, {upto}]")
    if limited and (not tokens or tokens[-1] != upto):
        raise ValueError("the page is limited, and does not end with its last row")
    epoch = _epoch_of(rest, asked)
    if len(tokens) > max(1, asked.limit) and tokens[0] != tokens[-1]:
        raise ValueError(f"{len(tokens)} rows, {asked.limit} were asked for")
    return UpdatesPage(asked.stream, asked.writer, asked.after, upto, tokens, payloads, limited, epoch)


def read_reference_page(body: bytes, asked: FetchUpdates, epoch: str) -> UpdatesPage:
    """The same of the reference system's answer, which names neither its epoch nor the question (9.25).

    Its writer has written no other row up to ``upto_token``. That may lie above the last row of a limited page, and
    above what was asked for: then rows above that are cut off. A limited page that ends with its last row may be cut
    within that fact: the fact is left out, and comes whole with the next page, unless it is the only one.
    """
    tokens, payloads, rest = cut_out(body) or decoded(body)
    upto, limited = _end_of(tokens, rest)
    cut = bisect_right(tokens, asked.upto)
    beyond = cut < len(tokens) or upto > asked.upto
    if tokens and not asked.after < tokens[0]:
        raise ValueError(f"token {tokens[0]} is not above {asked.after}, where the question begins")
    if tokens and tokens[-1] > upto < asked.upto:
        raise ValueError(f"upto_token {upto} is below the last row, {tokens[-1]}")
    if upto < asked.after or (limited and upto == asked.after):
        raise ValueError(f"upto_token {upto} does not lead on from {asked.after}")
    tokens, payloads, upto = tokens[:cut], payloads[:cut], min(upto, asked.upto)
    limited = limited and not beyond  # all that was asked for is there, what follows was not asked for
    if limited and tokens and tokens[0] != tokens[-1] == upto:
        whole = bisect_left(tokens, upto)
        tokens, payloads, upto = tokens[:whole], payloads[:whole], tokens[whole - 1]
    return UpdatesPage(asked.stream, asked.writer, asked.after, upto, tokens, payloads, limited, epoch)


def _end_of(tokens: list[Any], rest: Mapping[str, Any]) -> tuple[int, bool]:
    """``upto_token`` and ``limited`` of an answer with these tokens, which are integers and ascend."""
    upto, limited = rest.get("upto_token"), rest.get("limited")
    if type(upto) is not int or type(limited) is not bool:
        raise ValueError("upto_token is no integer, or limited no boolean")
    if set(map(type, tokens)) - {int}:
        raise ValueError("a token is no integer")
    if tokens != sorted(tokens):
        raise ValueError("tokens do not ascend")
    return upto, limited


def is_epoch(value: Any) -> TypeGuard[str]:
    """Whether it is one: 32 lowercase hexadecimal digits."""
    return isinstance(value, str) and _EPOCH.fullmatch(value) is not None


def _epoch_of(rest: Mapping[str, Any], asked: FetchUpdates) -> str:
    """The epoch of an answer to this question."""
    epoch = rest.get("epoch")
    if not is_epoch(epoch):
        raise ValueError("epoch is not 32 hexadecimal digits")
    for name, value in _question(asked).items():
        if rest.get(name) != value or type(rest[name]) is not type(value):
            raise ValueError(f"it answers another question: {name} is not {value!r}")
    return epoch


def cut_out(body: bytes) -> _Updates | None:
    """The rows as they stand in the text; None when it is not laid out as `write_page` does it."""
    text, found, tail = body.rpartition(_END)
    if not found or not text.startswith(_HEAD):
        return None
    entries = [entry.partition(b",") for entry in text[len(_HEAD) :].split(_BETWEEN)]
    numbers, _, payloads = zip(*entries, strict=True)
    try:
        tokens = orjson.loads(b"[" + b",".join(numbers) + b"]")
        values = orjson.loads(b"[" + _MARK_BETWEEN.join(payloads) + b"]")
        rest = orjson.loads(b"{" + tail)
    except ValueError:
        return None
    # As many tokens and as many rows as entries: no bracket or quote reaches from one to another, so that decoding the
    # whole would give the same.
    count = len(entries)
    if len(tokens) != count or len(values) != 2 * count - 1 or values[1::2].count(_MARK) != count - 1:
        return None
    return None if "updates" in rest else (tokens, payloads, rest)


def decoded(body: bytes) -> _Updates:
    """The same from any JSON text."""
    try:
        document = orjson.loads(body)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    updates = document.pop("updates", None) if isinstance(document, dict) else None
    if not isinstance(updates, list):
        raise ValueError("no object with a list of updates")
    if any(not isinstance(update, list) or len(update) != 2 for update in updates):
        raise ValueError("an update is not [token, row]")
    return [update[0] for update in updates], [json_bytes(update[1]) for update in updates], document


# -- what is known of writers ---------------------------------------------------------------------------------


@attrs.frozen
class CatchUpState:
    """What a reader without a database needs besides pages. ``sequence``: of the stream it was asked for (see
    ``AsyncStore.sequence``), ``newest``: likewise (see ``AsyncStore.newest``); None also when nobody asked."""

    epoch: str
    streams: Sequence[str]
    writers: Sequence[KnownWriter]
    sequence: int | None = None
    newest: Mapping[str, int] | None = None


def write_state(state: CatchUpState) -> bytes:
    """The answer of `STATE_PATH`."""
    return orjson.dumps({"version": STATE_VERSION, **attrs.asdict(state)})


def read_state(body: bytes) -> CatchUpState:
    """The other way round. Raises ValueError."""
    try:
        found = orjson.loads(body)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(found, dict) or found.get("version") != STATE_VERSION:
        raise ValueError(f"no state of version {STATE_VERSION}")
    epoch, streams, writers = found.get("epoch"), found.get("streams"), found.get("writers")
    if not is_epoch(epoch):
        raise ValueError("epoch is not 32 hexadecimal digits")
    if not isinstance(streams, list) or any(map(refuse_name, streams)):
        raise ValueError("streams is no list of names")
    if not isinstance(writers, list):
        raise ValueError("writers is no list")
    sequence = found.get("sequence")
    if sequence is not None and not _is_position(sequence):
        raise ValueError("sequence is no position")
    newest = found.get("newest")
    if newest is not None and not (
        isinstance(newest, dict) and not any(map(refuse_name, newest)) and all(map(_is_position, newest.values()))
    ):
        raise ValueError("newest is no object of positions")
    known = [_known_writer(writer) for writer in writers]
    if len({(one.stream, one.writer) for one in known}) != len(known):
        raise ValueError("a writer is named twice")
    return CatchUpState(epoch, streams, known, sequence, newest)


def _known_writer(found: Any) -> KnownWriter:
    names = [field.name for field in attrs.fields(KnownWriter)]
    if not isinstance(found, Mapping) or not all(name in found for name in names):
        raise ValueError(f"a writer needs {', '.join(names)}")
    writer = KnownWriter(**{name: found[name] for name in names})
    for kind, name in (("stream", writer.stream), ("writer", writer.writer)):
        if reason := refuse_name(name):  # 9.20: it may be one that no database can hold
            raise ValueError(f"the name of a {kind} {reason}")
    if not all(map(_is_position, (writer.position, writer.floor, writer.incarnation))):
        raise ValueError(f"position, floor or incarnation of writer {writer.writer!r} is no integer of 64 bits")
    if writer.floor > writer.position:
        raise ValueError(f"the floor of writer {writer.writer!r} is above its position")
    silent = writer.silent_for
    if type(silent) not in (int, float) or not math.isfinite(silent) or type(writer.registered) is not bool:
        raise ValueError(f"silent_for or registered of writer {writer.writer!r} is of another type")
    return writer


def _is_position(value: Any) -> bool:
    return type(value) is int and 0 <= value <= INT64_MAX
