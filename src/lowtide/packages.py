"""Packages that Lowtide can use: which command installs one that is missing, and which versions were tested.

Numpy is all that the core needs. Everything else is imported where it is used, inside `needed_for`. Front ends call
`check_version` when they are imported; any version that has what they use works, and one that was not tested is named
once, in a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType

from lowtide.errors import MissingPackageError

# What pip is asked for to have a package. Scipy and tqdm are asked for by name: with a framework installed by other
# means, an extra could replace it.
_REQUIREMENTS = {
    "torch": "lowtide[torch]",
    "jax": "lowtide[jax]",
    "jaxlib": "lowtide[jax]",
    "scipy": "scipy",
    "tqdm": "tqdm",
    "brainstate": "lowtide[brainstate]",
    "transformers": "lowtide[transformers]",
    "lightning": "lowtide[lightning]",
    "pytorch_lightning": "lowtide[lightning]",
    "typer": "lowtide[report]",
    "rich": "lowtide[report]",
    "matplotlib": "lowtide[report]",
}
# The release series with which every test is run, those of constraints.txt.
TESTED = {
    "torch": "2.13",
    "jax": "0.10",
    "brainstate": "0.5",
    "transformers": "5.22",
    "lightning": "2.6",
    "pytorch_lightning": "2.6",
}


# Those that users know by name; a framework brings the others.
USED = tuple(name for name in _REQUIREMENTS if name != "pytorch_lightning")


def is_installed(package: str) -> bool:
    """Whether a package can be found; it is not imported."""
    return find_spec(package) is not None


def command(*packages: str) -> str:
    """The command that installs these packages."""
    wanted = dict.fromkeys(_REQUIREMENTS[package] for package in packages)
    return " ".join(["pip install", *(f'"{name}"' if "[" in name else name for name in wanted)])


@contextmanager
def needed_for(what: str, otherwise: str = "") -> Iterator[None]:
    """Inside, a package that cannot be imported is reported as a `MissingPackageError`: `what` needs it.

    `otherwise` is the end of that message: what to do without the package.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if isinstance(error, MissingPackageError) or package not in _REQUIREMENTS or is_installed(package):
            raise  # not one of ours, or one that is broken: its own words say more
        message = f"{what} needs {package}, which is not installed: {command(package)}{otherwise}"
        raise MissingPackageError(message, name=package) from error


def check_version(package: ModuleType) -> None:
    """Warn if this version of a package is not of the series that is tested."""
    name = package.__name__
    if series(package.__version__) != TESTED[name]:
        warnings.warn(
            f"{name} {package.__version__} has not been tested with this version of Lowtide, {name} {TESTED[name]} "
            "has; `lowtide doctor` checks it here",
            stacklevel=2,
        )


def series(version: str) -> str:
    """The first two numbers of a version."""
    return ".".join(version.split(".")[:2])
