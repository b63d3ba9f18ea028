"""The store's password, which is in no option of Spark's: options are seen in plans, in the UI and in logs.

It is looked up on the driver, and travels to the executors inside the pickled reader alone.
"""

from __future__ import annotations

import getpass
import os
import re
import stat
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

import attrs

from busrep.errors import ConfigError
from busrep.urls import check_url, parse_url

REDIS_ADVICE = "the environment variable BUSREP_REDIS_PASSWORD of the driver"
ADVICE = "a file named by passwordFile (--password-file), the environment variable BUSREP_STORE_PASSWORD, or ~/.pgpass"

_SECRET_PARAMETER = re.compile(r"(?:^|(?<=&))password=([^&]*)&?")
_DEFAULT_PORT = "5432"


@attrs.frozen
class _Place:
    """A PostgreSQL URL in pieces, still quoted."""

    scheme: str
    user: str
    hosts: str
    database: str | None
    query: str | None

    def url(self, password: str | None = None) -> str:
        secret = "" if password is None else f":{quote(password, safe='')}"
        user = self.user or (quote(_default_user(), safe="") if password is not None else "")
        at = "@" if user or secret else ""
        database = "" if self.database is None else f"/{self.database}"
        return f"{self.scheme}://{user}{secret}{at}{self.hosts}{database}" + (f"?{self.query}" if self.query else "")


def split(store: str) -> tuple[str, str | None]:
    """The store's URL without its password, and the password, None when there is none. Raises ConfigError for a
    PostgreSQL URL that is none."""
    if not store.startswith(("postgresql:", "postgres:")):
        return store, None
    place, password = _parsed(store)
    return place.url(), password


def _parsed(store: str) -> tuple[_Place, str | None]:
    found = parse_url(store)
    if found is None or found.scheme not in ("postgresql", "postgres"):
        raise ConfigError("the store's URL is none: it is postgresql://user@host:port/database, special signs as %..")
    query, password = found.query or "", found.password or None
    for value in _SECRET_PARAMETER.findall(query):
        password = password or value
    query = _SECRET_PARAMETER.sub("", query).rstrip("&")
    place = _Place(found.scheme, found.user or "", found.hosts, found.path, query or None)
    return place, None if password is None else unquote(password)


def check(store: str) -> None:
    """Raises ConfigError when the URL holds a password."""
    bare, password = split(store)
    if password is not None:
        raise ConfigError(
            f"the option store holds a password, which plans and the UI of Spark would show: write {bare}, and put "
            f"the password into {ADVICE}"
        )
    if "sslpassword=" in store:
        raise ConfigError(
            "the option store holds sslpassword=, which plans and the UI of Spark would show: leave it out"
        )


def resolve(store: str, password_file: str | None = None) -> str:
    """The store's URL with the password that opens it. To be called on the driver.

    The password comes from, in this order: ``password_file`` (its first line), BUSREP_STORE_PASSWORD, BUSREP_STORE when
    it is this very store, PGPASSWORD, and the file of PGPASSFILE or ``~/.pgpass``. When none has it the URL is returned
    as it is, for a server that asks for none. Raises ConfigError for a URL that holds a password, and for a password
    file that cannot be read.
    """
    check(store)
    if not store.startswith(("postgresql:", "postgres:")):
        if password_file is not None:
            raise ConfigError("passwordFile is for PostgreSQL; a file has no password")
        return store
    place, _ = _parsed(store)
    password = (
        _from_file(password_file, "passwordFile")
        if password_file is not None
        else os.environ.get("BUSREP_STORE_PASSWORD")
        or _from_busrep_store(place)
        or os.environ.get("PGPASSWORD")
        or _from_pgpass(place)
    )
    return store if password is None else place.url(password)


def with_store_password(url: str, password_file: str | None, option: str) -> str:
    """A store's URL with the password of the file (its first line), or, unless it has one, of BUSREP_STORE_PASSWORD.
    Without both it is as it was, and libpq looks in its own places. Raises ConfigError, which names ``option``, for a
    file that cannot be read."""
    if not url.startswith(("postgresql:", "postgres:")):
        if password_file is not None:
            raise ConfigError(f"{option} is for PostgreSQL; a file has no password")
        return url
    place, password = _parsed(url)
    if password_file is not None:
        return place.url(_from_file(password_file, option))
    given = os.environ.get("BUSREP_STORE_PASSWORD")
    return place.url(given) if given and password is None else url


def with_redis_password(url: str, password_file: str | None, option: str = "redisPasswordFile") -> str:
    """A Redis URL with the password of the file (its first line), or, unless it has one, of BUSREP_REDIS_PASSWORD.
    Raises ConfigError, which names ``option``, for a file that cannot be read, and for a URL that is none. To be called
    on the driver, and the result to be kept there."""
    if password_file is not None:
        password = _from_file(password_file, option)
    elif not (password := os.environ.get("BUSREP_REDIS_PASSWORD", "")) or _has_redis_password(url):
        return url
    check_url(url, "the Redis URL", "redis://user@host:port/db")
    parts = urlsplit(url)
    user, _, host = parts.netloc.rpartition("@")
    netloc = f"{user.partition(':')[0]}:{quote(password, safe='')}@{host}"
    return parts._replace(netloc=netloc, query=_SECRET_PARAMETER.sub("", parts.query).rstrip("&")).geturl()


def _has_redis_password(url: str) -> bool:
    """Whether a URL holds the password of Redis, not of a key, or may hold it."""
    parts = parse_url(url)
    return parts is None or bool(parts.password) or any(_SECRET_PARAMETER.findall(parts.query or ""))


def _from_file(path: str, option: str) -> str:
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise ConfigError(f"option {option!r}: {path!r} cannot be read: {reason}") from None
    lines = text.splitlines()
    if not lines or not lines[0]:
        raise ConfigError(f"option {option!r}: the first line of {path!r} is empty, and should be the password")
    return lines[0]


def _from_busrep_store(place: _Place) -> str | None:
    try:
        other, password = _parsed(os.environ.get("BUSREP_STORE", ""))
    except ConfigError:  # another kind of store
        return None
    same = (other.user, other.hosts, other.database) == (place.user, place.hosts, place.database)
    return password if same else None


# -- libpq's file ----------------------------------------------------------------------------------------------------


def _default_user() -> str:
    return os.environ.get("PGUSER") or getpass.getuser()


def _from_pgpass(place: _Place) -> str | None:
    # libpq would read it by itself, but on the executors' machines it need not be there.
    path = Path(os.environ.get("PGPASSFILE") or os.path.expanduser("~/.pgpass"))
    try:
        with open(path) as file:
            mode = os.fstat(file.fileno())
            # As libpq: what others may read is no secret, and is ignored.
            if not stat.S_ISREG(mode.st_mode) or mode.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                return None
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    user = unquote(place.user) or _default_user()
    database = unquote(place.database or "") or os.environ.get("PGDATABASE") or user
    for one in place.hosts.split(","):
        host, port = _host_and_port(one)
        for line in lines:
            if (password := _password_in(line, host, port, database, user)) is not None:
                return password
    return None


def _host_and_port(text: str) -> tuple[str, str]:
    found = re.fullmatch(r"(\[[^\]]*\]|[^:]*)(?::(\d+))?", text)
    host, port = (found[1].strip("[]"), found[2]) if found else (text, None)
    host = unquote(host) or os.environ.get("PGHOST") or "localhost"
    # A socket's folder is written as localhost in the file.
    return "localhost" if host.startswith("/") else host, port or os.environ.get("PGPORT") or _DEFAULT_PORT


def _password_in(line: str, *wanted: str) -> str | None:
    if line.startswith("#"):
        return None
    fields = [re.sub(r"\\(.)", r"\1", one) for one in re.findall(r"((?:\\.|[^:\\])*)(?::|$)", line)]
    if len(fields) < len(wanted) + 1:
        return None
    hit = all(field in ("*", want) for field, want in zip(fields, wanted, strict=False))
    return (fields[len(wanted)] or None) if hit else None
