"""`lowtide doctor`: whether Lowtide keeps its promises here. It parses its own options, to work without typer."""

from __future__ import annotations

import typer

from lowtide import doctor

UNPARSED = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


def doctor_command(context: typer.Context) -> None:
    """Show what is installed, and whether Lowtide keeps its promises."""
    raise typer.Exit(doctor.main(context.args))
