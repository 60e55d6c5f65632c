"""The ``lethe`` program: what an operator does on the appliance. Thin: parse, call, print, exit status."""

from __future__ import annotations

from pathlib import Path

import click

from appliance import __version__
from appliance.cli import bench, local, operate
from appliance.config import DEFAULT_PATH
from provisioning.cli.report import run


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path, dir_okay=False),
    default=DEFAULT_PATH,
    show_default=True,
    help="Configuration file.",
)
@click.version_option(__version__, prog_name="lethe")
@click.pass_context
def group(context: click.Context, config_path: Path) -> None:
    """Run and watch a confidential model appliance."""
    context.obj = config_path


for command in (*operate.COMMANDS, *local.COMMANDS, *bench.COMMANDS):
    group.add_command(command)


def main() -> None:
    """Run the program; the exit status follows docs/exit-codes.md."""
    run(group, "lethe")
