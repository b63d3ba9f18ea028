"""docs/SECURITY.md: its numbers are the defaults, its links lead somewhere."""

from __future__ import annotations

import re
from inspect import signature

import pytest

from busrep.cli.app import cli
from busrep.errors import ConfigError
from busrep.http.serve import serve
from busrep.http.server import CatchUpLimits
from busrep.links import tcp_server
from busrep.urls import check_url, shown_url
from tests import ROOT

TEXT = (ROOT / "docs" / "SECURITY.md").read_text()


def test_the_readme_leads_to_it_and_it_leads_on() -> None:
    assert "/SECURITY/)" in (ROOT / "README.md").read_text()
    links = re.findall(r"\]\(([\w./-]+)(?:#[\w-]+)?\)", TEXT)
    assert links
    assert [link for link in links if not (ROOT / "docs" / link).exists()] == []


def test_its_numbers_are_the_defaults() -> None:
    limits = CatchUpLimits()
    for said in (
        f"one of {tcp_server.STRANGERS} places for strangers",
        f"one of {signature(serve).parameters['connections'].default} connections",
        f"{limits.concurrency} questions at the store at a time, {limits.queue} waiting",
        f"{limits.snapshots.snapshots} snapshots",
    ):
        assert said in TEXT, said


def test_its_rules_and_options_exist() -> None:
    protocol = (ROOT / "docs" / "protocol.md").read_text().partition("## 9.")[2]
    for number in set(re.findall(r"9\.(\d+)", TEXT)):
        assert re.search(rf"^{number}\. \*\*", protocol, re.MULTILINE), number
    known = {name for command in cli.commands.values() for option in command.params for name in option.opts}
    for option in set(re.findall(r"`(--[\w-]+)`", TEXT)):
        assert option in known, option


def test_a_password_is_encoded_as_it_says() -> None:
    assert shown_url("postgresql://me:a/b@db/shop") == "postgresql://..."
    parts = check_url("postgresql://me:a%2Fb%40c%25@db/shop", "the store URL", "")
    assert parts.password == "a%2Fb%40c%25"
    with pytest.raises(ConfigError, match="%2F, '@' is %40, '%' is %25"):
        check_url("postgresql://me:a/b@db/shop", "the store URL", "")
