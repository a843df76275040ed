from tests.cli.running import lowtide

__all__ = ["lowtide"]
