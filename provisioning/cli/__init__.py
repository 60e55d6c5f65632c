"""The ``lethe-owner`` program: what a model owner does, in a room that may have no network."""

from __future__ import annotations

import click

from provisioning.cli import bundle, exchange, wipe
from provisioning.cli.report import run


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="lethe", prog_name="lethe-owner")
def group() -> None:
    """Pack models, and answer key requests of appliances."""


for command in (*bundle.COMMANDS, *exchange.COMMANDS, *wipe.COMMANDS):
    group.add_command(command)


def main() -> None:
    """Run the program; the exit status follows docs/exit-codes.md."""
    run(group, "lethe-owner")
