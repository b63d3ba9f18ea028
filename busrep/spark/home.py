"""A SPARK_HOME without Spark's own copy of pyspark, so that Spark's Python workers start sooner.

Spark puts ``$SPARK_HOME/python/lib/pyspark.zip`` first on the path of each Python that it starts. A module in a zip
file has no compiled form on the disk, so each of these processes compiles pyspark anew: 0.8 s of processor, against
0.24 s with the installed package, and some five processes a job. Spark waits ten seconds for the one that a streaming
source has, and no setting changes that. On a busy machine the job then fails with "Python worker failed to connect
back".

A folder of links to the parts of Spark, without ``python``, has the same Spark in it, and its workers import the
pyspark that is installed beside busrep, which is of the same version.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import sysconfig
from pathlib import Path

from busrep.spark.java import private_folders

# What Spark's Java and its scripts look for below SPARK_HOME.
PARTS = ("bin", "conf", "data", "jars", "licenses", "sbin")


def find_home(python: str, master: str | None) -> Path | None:
    """The folder to use as SPARK_HOME. Makes it where there is none.

    None where the workers need Spark's own copy, or may need it: on Windows, with a SPARK_HOME of the user's, with
    ``python`` another one than this process has, with pyspark outside of its packages, on YARN and the like.
    """
    import pyspark

    spark = Path(pyspark.__file__).parent
    installed = {Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")}
    if (
        os.name != "posix"
        or "SPARK_HOME" in os.environ
        or python != sys.executable
        or spark.parent.resolve() not in installed
        or not (spark / "python" / "lib" / "pyspark.zip").is_file()
        or not (master or "").startswith(("local", "spark://"))
    ):
        return None
    links = {name: spark / name for name in PARTS if (spark / name).is_dir()}
    name = "spark-" + hashlib.sha256(repr(sorted(links.items())).encode()).hexdigest()[:12]
    for folder in private_folders(name):
        # A full or a read-only disk: the next folder will do.
        with contextlib.suppress(OSError):
            _link(folder, links)
            return folder
    return None


def _link(folder: Path, links: dict[str, Path]) -> None:
    """Make the links that are missing. Several processes may do it at once. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, target in links.items():
        with contextlib.suppress(FileExistsError):
            (folder / name).symlink_to(target, target_is_directory=True)
        if not (folder / name).samefile(target):
            raise OSError(f"{folder / name} is no link to {target}")
