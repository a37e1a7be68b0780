"""``cfl dashboard [--entity E] [--project P] [--base-url URL] [--benchmark NAME ...] [--dry-run FILE]``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from urllib.parse import urlsplit

from cfl.reporting.names import is_benchmark_name
from cfl.runtime.atomic_write import write_whole
from cfl.runtime.command_paths import given_path, require_file
from cfl.runtime.errors import ConfigError, reason
from cfl.runtime.extras import install


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cfl dashboard",
        description="Create or update a wandb workspace and a report that compare ACC, FGT and BWT of a project's "
        "runs, grouped by benchmark, partition, method and setting. Runs that were logged offline appear in them "
        "after wandb sync.",
        allow_abbrev=False,
    )
    parser.add_argument("--entity", help="user or team; unless given: WANDB_ENTITY, or whoever is logged in")
    parser.add_argument("--project", help="where the runs are; unless given: WANDB_PROJECT, or cfl")
    parser.add_argument(
        "--base-url", metavar="URL", help="address of the server; unless given: WANDB_BASE_URL, or wandb's own setting"
    )
    parser.add_argument(
        "--benchmark",
        action="append",
        default=[],
        metavar="NAME",
        help="show runs of this benchmark only; may be given several times; in the report each has its own run set",
    )
    parser.add_argument("--title", default="cfl: continual federated learning", help="of workspace and report")
    parser.add_argument(
        "--dry-run", type=given_path, metavar="FILE", help="write the specification as JSON; no server, no login"
    )
    return parser


def main(arguments: Sequence[str]) -> int:
    """Run the command line.

    Args:
        arguments: without the program's name and ``dashboard``.

    Returns:
        Exit status: 0, or 2 after one line on standard error.
    """
    options = _parser().parse_args(arguments)
    try:
        _run(options)
    except (ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _run(options: argparse.Namespace) -> None:
    missing = [name for name in ("wandb", "wandb_workspaces") if find_spec(name) is None]
    if missing:
        raise ConfigError("cfl dashboard", f"without {', '.join(missing)}", f"after {install('dashboards')}")
    _check(options)
    if options.base_url is not None:
        # wandb_workspaces takes the address from wandb, and wandb from this variable.
        os.environ["WANDB_BASE_URL"] = options.base_url.rstrip("/")
    project = options.project or os.environ.get("WANDB_PROJECT") or "cfl"
    entity = options.entity or os.environ.get("WANDB_ENTITY") or ""
    from cfl.reporting.dashboard.views import as_plain, report_of, workspace_of

    if options.dry_run is not None:
        made = [of(entity, project, options.title, options.benchmark) for of in (workspace_of, report_of)]
        require_file("--dry-run", options.dry_run)
        write_whole(options.dry_run, json.dumps(as_plain(*made), indent=2) + "\n")
        print(options.dry_run)
        return
    import wandb

    from cfl.reporting.dashboard.server import default_entity, publish

    try:
        entity = entity or default_entity()
        made = [of(entity, project, options.title, options.benchmark) for of in (workspace_of, report_of)]
        for address in publish(*made):
            print(address)
    except Exception as error:
        # If the server is unreachable or refuses, the library raises errors of requests or wandb, or a bare Exception.
        server = os.environ.get("WANDB_BASE_URL", "the address that wandb is set to")
        if not isinstance(error, wandb.errors.Error | OSError | ValueError) and type(error) is not Exception:
            raise
        valid = f"a server that answers and an account that may write there ({reason(error)})"
        raise ConfigError("cfl dashboard", f"{'/'.join(filter(None, (entity, project)))} at {server}", valid) from error


def _check(options: argparse.Namespace) -> None:
    address = options.base_url
    if address is not None and not _is_address(address):
        raise ConfigError("--base-url", address, "an address such as https://wandb.example.org")
    for key in ("entity", "project"):
        value = getattr(options, key)
        if value is not None and (not value or not value.isprintable() or set(value) & set("/\\#?%:")):
            raise ConfigError(f"--{key}", value, "a name without / \\ # ? % :")
    for name in options.benchmark:
        if not is_benchmark_name(name):
            raise ConfigError("--benchmark", name, "the name of a benchmark, as in run.benchmark")
    if not 0 < len(options.title) <= 128:
        raise ConfigError("--title", options.title, "1 to 128 characters")


def _is_address(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:  # no port, or brackets without an IPv6 address
        return False
