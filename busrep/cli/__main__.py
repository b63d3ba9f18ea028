"""``python -m busrep.cli`` is the same as ``busrep``."""

from busrep.cli import main

main()
