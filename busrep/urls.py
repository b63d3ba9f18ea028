"""URLs that may hold a password: how one is taken apart, and how it is shown.

Every module that takes a URL checks it here first, and shows it through `shown_url` alone. A URL whose parts cannot be
told apart with certainty (a raw ``/`` in a password looks like the begin of a path) is refused before a driver sees it,
because drivers quote what they could not read, and is shown as its scheme and three dots.
"""

from __future__ import annotations

import re

import attrs

from busrep.errors import ConfigError

# Schemes that are shown although no "://" follows: "postgres:/..." is a misspelling, "app:..." may be a user's name.
_SCHEMES = (
    "redis", "rediss", "unix", "tcp", "tcps", "http", "https", "sqlite", "postgres", "postgresql", "memory", "file",
    "s3", "gs", "gcs", "abfs", "abfss", "hdfs", "viewfs",
)  # fmt: skip
# Paths on the local machine: no user or password can stand in front of them, so "@" in them is a character.
_FILES = re.compile(r"(?P<scheme>sqlite|file|unix):///(?P<path>(?:(?!%00)[^\x00-\x1f\x7f?])*)(?:\?(?P<query>.*))?")
# In these a user without a password is a mistake, and usually is the password: redis://secret@host.
_WITH_PASSWORD_ALONE = ("redis", "rediss", "unix", "tcp", "tcps", "http", "https")

_CODE = r"%(?!00)[0-9A-Fa-f]{2}"
# Printable ASCII without %/?#@:[]\ (and "," in a host). ASCII alone: urllib refuses some other characters with an error
# that quotes the user and the password.
_WORD = rf"(?:[!\"$&-.0-9;->A-Z^-~]|{_CODE})*"
_HOST = rf"(?:\[[0-9A-Za-z:.%]*\]|(?:[!\"$&-+.0-9;->A-Z^-~-]|{_CODE})*)(?::\d{{0,5}})?"
_PARAMETER = rf"[\w.-]+=(?:[^\s\x00-\x1f\x7f%#@&]|{_CODE})*"
_URL = re.compile(
    rf"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?:(?P<user>{_WORD})(?::(?P<password>{_WORD}(?::{_WORD})*))?@)?"
    rf"(?P<hosts>{_HOST}(?:,{_HOST})*)"
    rf"(?:/(?P<path>(?:[^\s\x00-\x1f\x7f%?#@]|{_CODE})*))?(?:\?(?P<query>(?:{_PARAMETER}(?:&{_PARAMETER})*)?))?"
)
_SECRET_NAME = r"[\w.-]*(?:pass|pwd|secret|token|access_?key|credential|signature)[\w.-]*"  # noqa: S105 - of a parameter
_SECRET_PARAMETER = re.compile(rf"(?P<name>\b{_SECRET_NAME})=[^&]*", re.IGNORECASE)
# A connection string of libpq, or a piece of a query.
_SECRET_PAIR = re.compile(rf"\b{_SECRET_NAME}\s*=", re.IGNORECASE)
_LOOKS_LIKE_URL = re.compile(rf"[A-Za-z][A-Za-z0-9+.-]*://|(?:{'|'.join(_SCHEMES)}):", re.IGNORECASE)
# Not the forms that an error advises.
_IN_TEXT = re.compile(r"(?!\S*:(?:SECRET|password)\]?@)\b[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"]*:[^\s'\"]*@[^\s'\",;)]*")


@attrs.frozen
class UrlParts:
    """A URL taken apart; each part still percent-encoded. None: the part is not there."""

    scheme: str
    user: str | None
    password: str | None = attrs.field(repr=False)
    hosts: str
    path: str | None
    query: str | None = attrs.field(repr=False)


def parse_url(url: str) -> UrlParts | None:
    """Take a URL apart; None unless that can be done with certainty."""
    if (file := _FILES.fullmatch(url)) is not None:
        return UrlParts(file["scheme"], None, None, "", file["path"], file["query"])
    found = _URL.fullmatch(url)
    if found is None:
        return None
    return UrlParts(*(found[name] for name in ("scheme", "user", "password", "hosts", "path", "query")))


def check_url(url: str, what: str, forms: str) -> UrlParts:
    """Take a URL apart. Raises ConfigError, which names ``what`` and the ``forms`` that work, and shows no secret."""
    parts = parse_url(url)
    if parts is None:
        raise ConfigError(
            f"{what} {shown_url(url)!r} does not work; these forms do: {forms} (special characters of a user, a "
            "password, a path or a parameter are to be percent-encoded: '/' is %2F, '@' is %40, '%' is %25)"
        )
    return parts


def shown_url(url: str) -> str:
    """The URL as it may be shown in an error, a log or a repr: three stars for a password, and ``scheme://...`` for a
    URL that is not understood."""
    parts = parse_url(url)
    if parts is None:
        return _scheme_of(url) + "..."
    account = ""
    if parts.password is not None:
        account = f"{parts.user}:***@"
    elif parts.user:
        account = "***@" if parts.scheme in _WITH_PASSWORD_ALONE else f"{parts.user}@"
    path = "" if parts.path is None else f"/{parts.path}"
    query = "" if parts.query is None else "?" + _SECRET_PARAMETER.sub(r"\g<name>=***", parts.query)
    return f"{parts.scheme}://{account}{parts.hosts}{path}{query}"


def is_url(text: str) -> bool:
    """Whether a URL is meant, also by one that is misspelt; not a path of a file."""
    return _LOOKS_LIKE_URL.match(text) is not None


def has_secret(text: str) -> bool:
    """Whether ``text`` is a URL or a connection string that holds a password, or may hold one."""
    if not is_url(text):
        return _SECRET_PAIR.search(text) is not None or re.search(r":[^/]*@", text) is not None
    parts = parse_url(text)
    return parts is None or bool(parts.password) or _SECRET_PAIR.search(parts.query or "") is not None


def hide_secrets(text: str) -> str:
    """A text with the passwords in its URLs replaced: the last guard, for texts that other packages wrote."""
    return _IN_TEXT.sub(lambda found: shown_url(found[0]), text)


def _scheme_of(url: str) -> str:
    found = re.match(r"([A-Za-z][A-Za-z0-9+.-]{0,20})://", url)
    if found is not None:
        return found[0]
    scheme = url.partition(":")[0]
    return f"{scheme}:" if ":" in url and scheme in _SCHEMES else ""
