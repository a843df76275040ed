"""Targets are found and planned as users do it: by the command line."""

from tests.cli.running import lowtide

__all__ = ["lowtide"]
