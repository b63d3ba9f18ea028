"""The store's password: refused in options, and found in each of its places, on the driver."""

from __future__ import annotations

import getpass
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from busrep.errors import ConfigError
from busrep.spark import secrets

STORE = "postgresql://me@db:5433/shop"
SECRET = "p:a/s@s w?rd%"


@pytest.fixture(autouse=True)
def nothing_around(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("BUSREP_STORE", "BUSREP_STORE_PASSWORD", "PGPASSWORD", "PGPASSFILE", "PGHOST", "PGPORT", "PGUSER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("PGDATABASE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def pgpass(folder: Path, *lines: str, mode: int = 0o600, name: str = ".pgpass") -> Path:
    path = folder / name
    path.write_text("\n".join(lines) + "\n")
    path.chmod(mode)
    return path


@pytest.mark.parametrize(
    ("store", "bare", "password"),
    [
        ("postgresql://me@db/shop", "postgresql://me@db/shop", None),
        ("postgresql://me:pw@db:1/shop", "postgresql://me@db:1/shop", "pw"),
        ("postgresql://me:p%40w%25@db/shop?sslmode=require", "postgresql://me@db/shop?sslmode=require", "p@w%"),
        ("postgresql://:pw@db", "postgresql://db", "pw"),
        ("postgresql://me:@db", "postgresql://me@db", None),
        ("postgres://db/shop?password=p%26w&sslmode=require", "postgres://db/shop?sslmode=require", "p&w"),
        ("postgresql://db/shop?a=b&password=pw", "postgresql://db/shop?a=b", "pw"),
        ("postgresql://me:pw@[::1]:5432,other:1/shop", "postgresql://me@[::1]:5432,other:1/shop", "pw"),
        ("postgresql:///shop?host=/run", "postgresql:///shop?host=/run", None),
        ("sqlite:////data/a@b:c.db", "sqlite:////data/a@b:c.db", None),
    ],
)
def test_a_url_is_split(store: str, bare: str, password: str | None) -> None:
    assert secrets.split(store) == (bare, password)
    if password is None:
        secrets.check(store)
    else:
        with pytest.raises(ConfigError, match="BUSREP_STORE_PASSWORD") as raised:
            secrets.check(store)
        assert bare in str(raised.value)
        assert f":{password}@" not in str(raised.value)


@pytest.mark.parametrize(
    "store", ["postgresql://me:se@cret@db/shop", "postgresql://me:se/cret@db/shop", "postgresql://me:se?cret@db/shop"]
)
def test_a_password_that_is_not_quoted_is_refused_and_not_shown(store: str) -> None:
    for ask in (secrets.check, secrets.resolve, secrets.split):
        with pytest.raises(ConfigError, match="special signs") as raised:
            ask(store)
        assert "cret" not in str(raised.value)


def test_the_key_of_a_certificate_is_refused() -> None:
    with pytest.raises(ConfigError, match="sslpassword"):
        secrets.check("postgresql://me@db/shop?sslpassword=secret")


def test_each_place_in_its_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def found(password_file: str | None = None) -> str | None:
        return secrets.split(secrets.resolve(STORE, password_file))[1]

    assert secrets.resolve(STORE) == STORE
    pgpass(tmp_path, "db:5433:shop:me:home")
    assert found() == "home"
    monkeypatch.setenv("PGPASSFILE", str(pgpass(tmp_path, "*:*:*:*:named", name="other")))
    assert found() == "named"
    monkeypatch.setenv("PGPASSWORD", "libpq's")
    assert found() == "libpq's"
    monkeypatch.setenv("BUSREP_STORE", "postgresql://me:theirs@elsewhere:5433/shop")
    assert found() == "libpq's"
    monkeypatch.setenv("BUSREP_STORE", "postgresql://me:ours@db:5433/shop?sslmode=prefer")
    assert found() == "ours"
    monkeypatch.setenv("BUSREP_STORE_PASSWORD", SECRET)
    assert found() == SECRET
    file = tmp_path / "password"
    file.write_text("of the file\n\n")
    assert found(str(file)) == "of the file"


def test_what_is_returned_is_the_store_with_the_password_alone_added() -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("BUSREP_STORE_PASSWORD", SECRET)
        url = urlsplit(secrets.resolve(f"{STORE}?sslmode=require"))
    assert unquote(url.password or "") == SECRET
    assert (url.username, url.hostname, url.port, url.path, url.query) == ("me", "db", 5433, "/shop", "sslmode=require")


@pytest.mark.parametrize("named", [None, "someone"])
def test_the_user_is_the_drivers_where_the_url_has_none(named: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BUSREP_STORE_PASSWORD", "pw")
    if named is not None:
        monkeypatch.setenv("PGUSER", named)
    assert secrets.resolve("postgresql://db/shop") == f"postgresql://{named or getpass.getuser()}:pw@db/shop"


@pytest.mark.parametrize(
    ("line", "password"),
    [
        ("db:5433:shop:me:pw", "pw"),
        ("*:*:*:*:pw", "pw"),
        (r"db:5433:shop:me:p\:w\\", "p:w\\"),
        ("db:5433:shop:me:pw:more", "pw"),
        ("db:5432:shop:me:pw", None),
        ("other:5433:shop:me:pw", None),
        ("db:5433:other:me:pw", None),
        ("db:5433:shop:you:pw", None),
        ("db:5433:shop:me:", None),
        ("db:5433:shop", None),
        ("# db:5433:shop:me:pw", None),
        ("", None),
    ],
)
def test_lines_of_pgpass(line: str, password: str | None, tmp_path: Path) -> None:
    pgpass(tmp_path, "other:1:x:y:no", line)
    assert secrets.split(secrets.resolve(STORE))[1] == password


def test_a_socket_is_localhost_in_pgpass_and_defaults_are_libpqs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pgpass(tmp_path, "localhost:5432:me:me:pw")
    for store in ("postgresql://me@", "postgresql://me@%2Frun%2Fpg/me", "postgresql://me@localhost/"):
        assert secrets.split(secrets.resolve(store))[1] == "pw"
    monkeypatch.setenv("PGDATABASE", "other")
    assert secrets.split(secrets.resolve("postgresql://me@"))[1] is None


@pytest.mark.parametrize("mode", [0o640, 0o604])
def test_a_pgpass_that_others_read_is_ignored(mode: int, tmp_path: Path) -> None:
    pgpass(tmp_path, "*:*:*:*:pw", mode=mode)
    assert secrets.resolve(STORE) == STORE


def test_password_files_that_do_not_work(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        secrets.resolve(STORE, str(tmp_path / "none"))
    (tmp_path / "empty").write_text("\npw\n")
    with pytest.raises(ConfigError, match="first line"):
        secrets.resolve(STORE, str(tmp_path / "empty"))
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="no text"):
        secrets.resolve(STORE, str(tmp_path / "bytes"))


def test_a_file_needs_no_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BUSREP_STORE_PASSWORD", "pw")
    assert secrets.resolve("sqlite:////data/x.db") == "sqlite:////data/x.db"
    with pytest.raises(ConfigError, match="for PostgreSQL"):
        secrets.resolve("sqlite:////data/x.db", "file")
