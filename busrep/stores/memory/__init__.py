"""Backing tables that end with the process."""
