"""Loads the fixtures of busrep."""

pytest_plugins = ["busrep.testing.fixtures"]
