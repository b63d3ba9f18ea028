"""docs/frameworks.md and its guides: what stands there runs, and the examples there are the files."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

import psycopg
import pytest

from busrep import Stream
from busrep.stores.blocking import open_blocking_store
from busrep.streams import Registry
from tests import ROOT
from tests.docs.markdown import blocks_for, files
from tests.sync.test_writing import Wire

GUIDES = ROOT / "docs" / "guides"
FILES = files(ROOT / "docs" / "frameworks.md", GUIDES / "django.md", GUIDES / "fastapi.md", GUIDES / "celery.md")
RUN = [block.code for _, block in blocks_for(GUIDES / "sqlalchemy.md", "docs/test_integrations.py")]


def test_the_files_are_there() -> None:
    assert set(FILES) == {
        "orders.py", "settings.py", "shop/facts.py", "shop/apps.py", "shop/views.py", "fastapi_orders.py",
        "celery_orders.py",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["fastapi_orders.py", "celery_orders.py"])
def test_the_examples_are_the_files(name: str) -> None:
    """Which the tests in tests/integrations run."""
    assert FILES[name] == (ROOT / "docs" / "examples" / name).read_text()


def run(folder: Path, code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning", "-c", code],
        cwd=folder, env={**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", **environment},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def written(folder: Path, **more: str) -> None:
    for name, code in (FILES | more).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(code)


@pytest.mark.servers
def test_the_sqlalchemy_blocks_run(redis_url: str, bus_name: str, postgres_url: str, tmp_path: Path) -> None:
    store = open_blocking_store(postgres_url, Registry([Stream("orders")]))
    store.init()
    store.close()
    written(tmp_path)
    code = "\n".join(RUN).replace('"redis://localhost:6379"', repr(redis_url)).replace('"shop"', repr(bus_name))
    code = code.replace(
        "postgresql+psycopg://localhost/shop", postgres_url.replace("postgresql:", "postgresql+psycopg:")
    )
    code = code.replace("postgresql://localhost/shop", postgres_url)
    with Wire(redis_url, bus_name) as wire:
        run(tmp_path, code + "engine.dispose()\n")
        assert wire.tokens(1, writer="web-1") == [1]
        assert wire.tokens(2, writer="web-2") == [2]
    with psycopg.connect(postgres_url) as connection:
        assert connection.execute("SELECT number, state FROM orders ORDER BY 1").fetchall() == [(1, "new"), (2, "new")]


PROJECT = {
    "shop/__init__.py": "",
    "shop/models.py": """
from django.db import models


class Order(models.Model):
    number = models.IntegerField(primary_key=True)
    state = models.TextField()
""",
    "shop/urls.py": """
from django.urls import path

from shop.views import pay

urlpatterns = [path("orders/<int:number>/pay", pay)]
""",
}

SERVICE = """
import django
django.setup()
from django.core.management import call_command
from django.test import Client
call_command("migrate", run_syncdb=True, verbosity=0)
from shop.models import Order
Order.objects.create(number=7, state="new")
print(Client(SERVER_NAME="localhost").get("/orders/7/pay").status_code, Order.objects.get().state)
"""

SERVICE_TEST = """
from django.test import TransactionTestCase
from busrep.integrations.django import bus


class Paying(TransactionTestCase):
    def test_it_is_published(self):
        self.assertEqual(self.client.get("/orders/7/pay").status_code, 204)
        self.assertEqual(list(bus().positions()["orders"].values()), [1])

    def tearDown(self):
        from busrep.integrations.django import close
        close()
"""


@pytest.mark.servers
def test_the_django_project_runs_and_so_do_its_tests(
    redis_url: str, bus_name: str, postgres_url: str, tmp_path: Path
) -> None:
    written(tmp_path, **PROJECT)
    settings = FILES["settings.py"].replace('"redis://localhost:6379"', repr(redis_url))
    settings = settings.replace('"name": "shop"', f'"name": "{bus_name}"')
    (tmp_path / "settings.py").write_text(settings + 'USE_TZ = True\nALLOWED_HOSTS = ["localhost"]\n')
    url = urlsplit(postgres_url)
    environment = {
        "DJANGO_SETTINGS_MODULE": "settings", "SECRET_KEY": "x", "PGHOST": str(url.hostname), "PGPORT": str(url.port),
        "PGUSER": str(url.username), "PGPASSWORD": unquote(url.password or ""), "PGDATABASE": url.path[1:],
        "WORKER": "3",
    }  # fmt: skip
    with Wire(redis_url, bus_name) as wire:
        assert run(tmp_path, SERVICE, **environment) == "204 paid\n"
        (line,) = [line for line in wire.read(lambda lines: "RDATA" in str(lines)) if line.startswith("RDATA")]
        assert re.fullmatch(r'RDATA orders \S+-3 1 \[7,"paid"\]', line)
    (tmp_path / "shop" / "tests.py").write_text(SERVICE_TEST)
    code = "from django.core.management import execute_from_command_line as run; run(['manage', 'test', '-v', '0'])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Ran 1 test" in done.stderr
