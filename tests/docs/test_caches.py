"""docs/caches.md: what stands there runs, and prints what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

import psycopg
import pytest

import busrep
from busrep.caches.cache import invalidations
from busrep.stores.blocking import open_blocking_store
from busrep.streams import Registry
from tests import ROOT
from tests.docs.markdown import blocks_for, files
from tests.docs.test_integrations import FILES as FRAMEWORKS

PAGE = ROOT / "docs" / "caches.md"
TEXT = PAGE.read_text()
BLOCKS = [(key, block.code, block.prints) for key, block in blocks_for(PAGE, "docs/test_caches.py")]
FILES = files(PAGE)


@pytest.fixture
def database(postgres_url: str) -> str:
    store = open_blocking_store(postgres_url, Registry([invalidations()]))
    store.init()
    store.close()
    with psycopg.connect(postgres_url) as connection:
        connection.execute("CREATE TABLE items (number int PRIMARY KEY, price int, name text)")
        connection.execute("INSERT INTO items VALUES (1, 100, 'coffee')")
    return postgres_url


def run(folder: Path, code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning", "-c", code],
        cwd=folder, env={**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", **environment},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_every_block_prints_something() -> None:
    assert {mark for mark, _, _ in BLOCKS} == {"threads", "asyncio", "sqlalchemy"}
    assert set(FILES) == {"shop/items.py", "items.py"}
    assert all(printed for _, _, printed in BLOCKS)


@pytest.mark.servers
def test_the_blocks_run_and_print_what_they_say(redis_url: str, bus_name: str, database: str, tmp_path: Path) -> None:
    code, printed = "", ""
    # The buses of all blocks are there at once, as processes would be; asyncio's is over before the next block.
    for mark, block, said in BLOCKS:
        assert said is not None
        # What a reader who types does not see: a bus that was just opened may keep nothing yet, and another process's
        # invalidation takes a moment.
        block = block.replace("bus.open()\n", "bus.open()\n" + UNTIL_IT_IS_HEARD)
        code, printed = code + block + (UNTIL_IT_IS_KNOWN if mark == "asyncio" else "\n"), printed + said
    code = code.replace('"redis://localhost:6379"', repr(redis_url)).replace('"shop"', repr(bus_name))
    url = database.replace("postgresql:", "postgresql+psycopg:")
    code = code.replace('"postgresql+psycopg://localhost/shop"', repr(url))
    code = code.replace('"postgresql://localhost/shop"', repr(database))
    assert run(tmp_path, code + "bus.close()\n") == printed


UNTIL_IT_IS_HEARD = """
import time
while not bus.statistics()["caches"]["streams"]["caches"]["following"]:
    time.sleep(0.01)
"""

UNTIL_IT_IS_KNOWN = """
while price(1) != 300:
    time.sleep(0.01)
"""

FASTAPI = """
import asyncio
import httpx
import items

async def main():
    transport = httpx.ASGITransport(items.app)
    async with items.lifespan(items.app), httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        print((await client.get("/items/1")).json())
        assert (await client.put("/items/1/250")).status_code == 200
        print((await client.get("/items/1")).json())

asyncio.run(main())
"""


@pytest.mark.servers
def test_the_fastapi_example_runs(redis_url: str, bus_name: str, database: str, tmp_path: Path) -> None:
    (tmp_path / "items.py").write_text(FILES["items.py"])
    environment = {"BUSREP_REDIS": redis_url, "BUSREP_NAME": bus_name, "BUSREP_STORE": database, "ITEMS_WRITER": "w1"}
    assert run(tmp_path, FASTAPI, **environment) == "100\n250\n"


PROJECT = {
    "shop/__init__.py": "",
    "shop/facts.py": """
from busrep.caches import invalidations

caches = invalidations()
streams = [caches]
""",
    "shop/apps.py": FRAMEWORKS["shop/apps.py"],
    "shop/models.py": """
from django.db import models


class Item(models.Model):
    number = models.IntegerField(primary_key=True)
    price = models.IntegerField()
""",
    "shop/urls.py": """
from django.http import HttpResponse
from django.urls import path

from shop import items


def show(request, number):
    return HttpResponse(items.price(number))


def change(request, number, new):
    items.change(number, new)
    return HttpResponse()


urlpatterns = [path("items/<int:number>", show), path("items/<int:number>/<int:new>", change)]
""",
}

DJANGO = """
import time
import django
django.setup()
from django.core.management import call_command
from django.test import Client
call_command("migrate", run_syncdb=True, verbosity=0)
from shop.models import Item
Item.objects.create(number=7, price=100)
client = Client(SERVER_NAME="localhost")

def show():
    print(client.get("/items/7").content.decode())

show()  # which loads the module
from shop import items
client.get("/items/7")  # the bus is opened by the request
from busrep.integrations.django import bus
while not items.price.statistics()["hits"]:
    items.price(7)
client.get("/items/7/250")
show()
print(items.price.statistics()["invalidations"])
"""


@pytest.mark.servers
def test_the_django_example_runs(redis_url: str, bus_name: str, postgres_url: str, tmp_path: Path) -> None:
    for name, code in (PROJECT | {"shop/items.py": FILES["shop/items.py"]}).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(code)
    settings = FRAMEWORKS["settings.py"].replace('"redis://localhost:6379"', repr(redis_url))
    settings = settings.replace('"name": "shop"', f'"name": "{bus_name}"')
    (tmp_path / "settings.py").write_text(settings + 'USE_TZ = True\nALLOWED_HOSTS = ["localhost"]\n')
    url = urlsplit(postgres_url)
    environment = {
        "DJANGO_SETTINGS_MODULE": "settings", "SECRET_KEY": "x", "PGHOST": str(url.hostname), "PGPORT": str(url.port),
        "PGUSER": str(url.username), "PGPASSWORD": unquote(url.password or ""), "PGDATABASE": url.path[1:],
        "WORKER": "3",
    }  # fmt: skip
    assert run(tmp_path, DJANGO, **environment) == "100\n250\n1\n"


def test_names_of_the_api_in_the_text_exist() -> None:
    for name in set(re.findall(r"\bbus\.(\w+)", TEXT)):
        assert hasattr(busrep.sync.Bus, name), name
