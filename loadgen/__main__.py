"""python -m loadgen: the table of contents. Flags are in cli.py, the commands in modules of their names."""

from __future__ import annotations

import sys

import click

from loadgen.cli import cli
from loadgen.options import UnusableServer, UsageError


def main() -> None:
    """Run one command; every expected error is one line on standard error and exit status 2."""
    try:
        sys.exit(cli.main(prog_name="loadgen", standalone_mode=False) or 0)
    except click.exceptions.NoArgsIsHelpError as help_text:
        click.echo(help_text.format_message())
        sys.exit(2)
    except click.ClickException as error:
        _fail(error.format_message())
    except (UsageError, UnusableServer) as error:
        _fail(str(error))
    except (KeyboardInterrupt, click.Abort):
        click.echo("loadgen: interrupted", err=True)
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)


def _fail(message: str) -> None:
    click.echo("loadgen: " + " ".join(message.split()), err=True)
    sys.exit(2)


if __name__ == "__main__":
    main()
