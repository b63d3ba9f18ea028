"""Pages of catch-up as they travel: there and back byte for byte, whatever the rows, and every lie refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from busrep.core.catchup import FetchUpdates, UpdatesPage
from busrep.core.fields import INT64_MAX, INT64_MIN, json_bytes
from busrep.http import pages as http_pages
from busrep.http.pages import CatchUpState, bounded, read_page, read_state, write_page, write_state
from busrep.stores.interface import KnownWriter

EPOCH = "0123456789abcdef" * 2
OTHER_EPOCH = "f" * 32

QUICKLY = settings(max_examples=200)

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(INT64_MIN, INT64_MAX)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=4)
    ),
    max_leaves=12,
)


def page_of(facts: list[tuple[int, list[bytes]]], upto: int, *, limited: bool = False, after: int = 0) -> UpdatesPage:
    tokens = [token for token, payloads in facts for _ in payloads]
    payloads = [payload for _, payloads in facts for payload in payloads]
    return UpdatesPage("orders", "w1", after, upto, tokens, payloads, limited, EPOCH)


def asked(after: int = 0, upto: int = 10, limit: int = 1000) -> FetchUpdates:
    return FetchUpdates("orders", "w1", after, upto, limit)


def same(found: UpdatesPage, sent: UpdatesPage) -> bool:
    def plain(page: UpdatesPage) -> UpdatesPage:
        return attrs.evolve(page, tokens=list(page.tokens), payloads=list(page.payloads))

    return plain(found) == plain(sent)


def body_of(
    updates: Any = (), upto: Any = 10, limited: Any = False, epoch: Any = EPOCH, after: Any = 3, **more: Any
) -> bytes:
    question = {"stream": "orders", "instance_name": "w1", "from_token": after}
    return orjson.dumps(
        {"updates": updates, "upto_token": upto, "limited": limited, "epoch": epoch, **question, **more}
    )


@QUICKLY
@given(facts=st.lists(st.lists(json_values, min_size=1, max_size=3), max_size=6), step=st.integers(1, 10**15))
def test_rows_come_back_byte_for_byte(facts: list[list[Any]], step: int) -> None:
    sent = page_of([(step * (at + 1), list(map(json_bytes, rows))) for at, rows in enumerate(facts)], step * 6)
    body = write_page(sent)
    question = asked(upto=step * 6)
    assert same(read_page(body, question), sent)
    assert orjson.loads(body)["updates"] == [
        [token, orjson.loads(payload)] for token, payload in zip(sent.tokens, sent.payloads, strict=True)
    ]
    if facts:
        assert http_pages.cut_out(body) is not None, "the fast way was not taken"
    # What a proxy that rewrites JSON leaves of it.
    for option in (0, orjson.OPT_INDENT_2):
        assert same(read_page(orjson.dumps(orjson.loads(body), option=option), question), sent)


@QUICKLY
@given(rows=st.lists(st.text('[]{},:"\\ 019truefalsn\n', max_size=12).map(str.encode), min_size=1, max_size=4))
def test_cut_out_or_decoded_is_the_same(rows: list[bytes]) -> None:
    """Also of what no store holds: the fast way never takes what decoding the whole would refuse or see otherwise."""
    sent = page_of([(at + 1, [row]) for at, row in enumerate(rows)], 10)
    body = write_page(sent)
    fast = http_pages.cut_out(body)
    try:
        slow = http_pages.decoded(body)
    except ValueError:
        assert fast is None
        return
    if fast is not None:
        assert list(fast[0]) == slow[0]
        assert list(map(orjson.loads, fast[1])) == list(map(orjson.loads, slow[1]))
        assert fast[2] == slow[2]


ODD_ROWS = [
    [b"1],[2", b"3"],  # a row that would be two
    [b"1],[2", b'"a', b'b"'],  # and two that would be one, so that the number fits
    [b"1,2,3", b'"a', b'b"'],
    [b"[1", b"2]"],
    [b""],
    [b"1,2"],
    [b"NaN"],
    [b"01"],
    [b"'x'"],
    [b'"\x01"'],
    [b"[" * 2000 + b"]" * 2000],
]


@pytest.mark.parametrize("rows", ODD_ROWS)
def test_a_row_that_is_no_json_value_is_refused(rows: list[bytes]) -> None:
    with pytest.raises(ValueError, match="JSON|update|token"):
        read_page(write_page(page_of([(at + 1, [row]) for at, row in enumerate(rows)], 10)), asked())


def test_a_row_with_a_line_break_is_read_all_the_same() -> None:
    sent = page_of([(1, [b"[[1],\n[2]]"]), (2, [b'{"a":\n1}'])], 10)
    assert same(read_page(write_page(sent), asked()), page_of([(1, [b"[[1],[2]]"]), (2, [b'{"a":1}'])], 10))


LIES: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "not JSON"),
    "a page of HTML": (b"<html>", "not JSON"),
    "cut in the middle": (body_of([[1, ["a"]]])[:-9], "not JSON"),
    "a list": (b"[]", "no object"),
    "no updates": (b'{"upto_token":10,"limited":false}', "no object with a list"),
    "updates no list": (body_of({"1": 2}), "no object with a list"),
    "an update too short": (body_of([[1]]), "not .token, row"),
    "an update too long": (body_of([[1, 2, 3]]), "not .token, row"),
    "an update no list": (body_of([7]), "not .token, row"),
    "a token of text": (body_of([["1", 0]]), "token is no integer"),
    "a token of truth": (body_of([[True, 0]]), "token is no integer"),
    "a token with a point": (body_of([[1.0, 0]]), "token is no integer"),
    "a token beyond 64 bits": (b'{"updates":[[99999999999999999999,0]],"upto_token":10,"limited":false}', "no integer"),
    "a row beyond 64 bits": (b'{"updates":[[1,1e999]],"upto_token":10,"limited":false}', "JSON"),
    "tokens descend": (body_of([[3, 0], [2, 0]]), "do not ascend"),
    "a fact taken up again": (body_of([[1, 0], [2, 0], [1, 0]]), "do not ascend"),
    "below what was asked": (body_of([[2, 0], [5, 0]]), "not within"),
    "at what was had": (body_of([[3, 0]]), "not within"),
    "above what was asked": (body_of([[11, 0]]), "not within"),
    "above what it proves": (body_of([[9, 0]], 8), "not within"),
    "negative": (body_of([[-4, 0]]), "not within"),
    "proves more than was asked": (body_of(upto=11), "upto_token"),
    "proves less than was had": (body_of(upto=2), "upto_token"),
    "upto of text": (body_of(upto="10"), "upto_token"),
    "upto of truth": (body_of(upto=True), "upto_token"),
    "no upto": (b'{"updates":[],"limited":false}', "upto_token"),
    "limited a number": (body_of(limited=0), "limited"),
    "limited without a row": (body_of(limited=True), "limited"),
    "limited and proves more than its rows": (body_of([[4, 0]], 10, True), "limited"),
    "no epoch": (body_of(epoch=None), "epoch"),
    "epoch too short": (body_of(epoch="ab"), "epoch"),
    "epoch in capitals": (body_of(epoch="A" * 32), "epoch"),
    "more rows than were asked for": (body_of([[4, 0], [5, 0], [6, 0]]), "2 were asked"),
    "of another stream": (body_of(stream="payments"), "another question: stream is not 'orders'"),
    "of another writer": (body_of([[4, 0]], instance_name="w2"), "another question: instance_name is not 'w1'"),
    "empty, after another token": (body_of(upto=5, after=5), "another question: from_token is not 3"),
    "after a token with a point": (body_of(after=3.0), "another question"),
    "of no question": (orjson.dumps({"updates": [], "upto_token": 10, "limited": False, "epoch": EPOCH}), "another"),
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("laid_out", [False, True])
def test_a_lie_is_refused(lie: str, laid_out: bool) -> None:
    body, reason = LIES[lie]
    if laid_out:  # as our own server would lie
        body = body.replace(b'{"updates":[[', http_pages._HEAD).replace(b"],[", http_pages._BETWEEN)
        body = body.replace(b']],"', http_pages._END + b'"')
    with pytest.raises(ValueError, match=reason):
        read_page(body, asked(3, 10, 2))


def test_a_key_given_twice_does_not_smuggle_rows() -> None:
    body = write_page(page_of([(1, [b"0"])], 10))[:-1] + b',"updates":[[2,0]]}'
    assert list(read_page(body, asked()).tokens) == [2]  # the last one counts, as for whoever decodes it


@pytest.mark.parametrize("upto", [3, 7, 10])
def test_an_answer_may_prove_less_than_was_asked(upto: int) -> None:
    found = read_page(body_of(upto=upto), asked(3, 10))
    assert (found.upto, found.limited, list(found.tokens)) == (upto, False, [])


def test_one_large_fact_may_be_more_than_was_asked_for() -> None:
    found = read_page(body_of([[5, 0]] * 7, 5, True), asked(3, 10, 2))
    assert list(found.tokens) == [5] * 7


# -- the reference system's answers ---------------------------------------------------------------------------


def test_a_reference_answer_has_three_keys() -> None:
    page = page_of([(1, [b'["a"]'])], 1, limited=True)
    assert orjson.loads(write_page(page, reference=True)) == {"updates": [[1, ["a"]]], "upto_token": 1, "limited": True}
    assert orjson.loads(write_page(page_of([], 5), reference=True)) == {
        "updates": [], "upto_token": 5, "limited": False,
    }  # fmt: skip


# -- bounds ---------------------------------------------------------------------------------------------------


@QUICKLY
@given(sizes=st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=4), max_size=8), most=st.integers(1, 120))
def test_a_page_cut_by_bytes_ends_on_a_fact(sizes: list[list[int]], most: int) -> None:
    facts = [(2 * at + 1, [b"1" * size for size in fact]) for at, fact in enumerate(sizes)]
    page = page_of(facts, 100)
    cut = bounded(page, most)
    count = len(cut.tokens)
    assert list(cut.tokens) == list(page.tokens)[:count]
    assert list(cut.payloads) == list(page.payloads)[:count]
    if count == len(page.tokens):
        assert cut == page
    else:
        assert page.tokens[count] != page.tokens[count - 1], "a fact was split"
        assert (cut.limited, cut.upto) == (True, cut.tokens[-1])
    one_fact = cut.tokens and cut.tokens[0] == cut.tokens[-1]
    assert sum(map(len, cut.payloads)) <= most or one_fact
    if count < len(page.tokens):  # and not shorter than it needs to be
        following = [p for t, p in zip(page.tokens, page.payloads, strict=True) if t == page.tokens[count]]
        assert sum(map(len, cut.payloads)) + sum(map(len, following)) > most


# -- what is known of writers ---------------------------------------------------------------------------------

WRITER = KnownWriter("orders", "w1", 7, 3, True, 12, 0.5)
STATE = CatchUpState(EPOCH, ["orders", "payments"], [WRITER, attrs.evolve(WRITER, writer="w2", registered=False)], 9)


@pytest.mark.parametrize("state", [STATE, attrs.evolve(STATE, sequence=None), CatchUpState(EPOCH, [], [])])
def test_a_state_comes_back(state: CatchUpState) -> None:
    assert read_state(write_state(state)) == state


def test_a_state_may_say_more_than_we_know() -> None:
    document = orjson.loads(write_state(STATE))
    document["weather"] = document["writers"][0]["mood"] = "fine"
    assert read_state(orjson.dumps(document)) == STATE


def _set(*path: Any, value: Any) -> Callable[[Any], None]:
    def change(document: Any) -> None:
        for step in path[:-1]:
            document = document[step]
        document[path[-1]] = value

    return change


BAD_STATES: dict[str, tuple[Callable[[Any], None], str]] = {
    "another version": (_set("version", value=2), "version"),
    "no version": (lambda found: found.pop("version"), "version"),
    "no epoch": (lambda found: found.pop("epoch"), "epoch"),
    "an epoch of another kind": (_set("epoch", value="x" * 32), "epoch"),
    "streams no list": (_set("streams", value="orders"), "streams"),
    "a stream no name": (_set("streams", value=[1]), "streams"),
    "writers no list": (_set("writers", value={}), "writers"),
    "a writer no object": (_set("writers", 0, value=1), "needs"),
    "a writer without a floor": (lambda found: found["writers"][0].pop("floor"), "needs"),
    "a name with a space": (_set("writers", 0, "writer", value="w 1"), "writer holds a space"),
    "a name with a line break": (_set("writers", 0, "stream", value="orders\n"), "stream holds a newline"),
    "a name with a NUL": (_set("writers", 0, "writer", value="w\0"), "writer holds a control character"),
    "a name of 256 bytes": (_set("writers", 0, "writer", value="ü" * 128), "writer is longer than 255 bytes"),
    "a name that is a number": (_set("writers", 0, "writer", value=1), "the name of a writer"),
    "a stream that is served with a NUL": (_set("streams", value=["orders\0"]), "streams"),
    "a writer's newest row with a NUL": (_set("newest", value={"w\0": 7}), "newest"),
    "a position below zero": (_set("writers", 0, "position", value=-1), "no integer"),
    "a position with a point": (_set("writers", 0, "position", value=7.0), "no integer"),
    "a position of truth": (_set("writers", 0, "position", value=True), "no integer"),
    "a floor beyond 64 bits": (_set("writers", 0, "floor", value=2**63), "no integer"),
    "a floor above the position": (_set("writers", 0, "floor", value=8), "above its position"),
    "an incarnation of text": (_set("writers", 0, "incarnation", value="1"), "no integer"),
    "registered a number": (_set("writers", 0, "registered", value=1), "registered"),
    "silent for ever": (_set("writers", 0, "silent_for", value=None), "silent_for"),
    "a writer twice": (_set("writers", 1, "writer", value="w1"), "twice"),
    "a sequence of text": (_set("sequence", value="9"), "sequence"),
}


@pytest.mark.parametrize("lie", BAD_STATES)
def test_a_state_that_cannot_be_is_refused(lie: str) -> None:
    change, reason = BAD_STATES[lie]
    document = orjson.loads(write_state(STATE))
    change(document)
    with pytest.raises(ValueError, match=reason):
        read_state(orjson.dumps(document))


@pytest.mark.parametrize("body", [b"", b"[]", b"null", b"{", b'{"version":1}'])
def test_what_is_no_state_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError, match=r"JSON|version|epoch"):
        read_state(body)
