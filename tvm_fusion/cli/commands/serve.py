# SPDX-License-Identifier: Apache-2.0
"""Command ``tvm-fusion serve``."""

from __future__ import annotations

from typing import Any

import click

from ..options import threads_option
from ..output import say


@click.command("serve")
@click.option("--tracker", "address", metavar="HOST:PORT", required=True, help="TVM's RPC tracker.")
@click.option("--key", required=True, help="Name under which jobs find this machine.")
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address on which jobs are taken: this machine's own alone, or 0.0.0.0 for all networks. "
    "RPC has no authentication: whoever reaches the port can run any code here.",
)
@click.option("--port", type=click.IntRange(1, 65535), help="Default: a free one from 9090 on.")
@threads_option
def serve_command(address: str, key: str, host: str, port: int | None, threads: int | None) -> None:
    """Measure on this machine for tuning jobs on others, until Ctrl-C.

    Start a tracker first (python -m tvm.exec.rpc_tracker); jobs are then run by
    tvm-fusion tune --runner rpc://HOST:PORT/KEY.
    """
    from ...tuning.remote import Tracker
    from ...tuning.server import serve

    def ready(about: dict[str, Any]) -> None:
        cpu = about["cpu"]
        say(
            f"serving {about['processor']} ({cpu['family']}, {cpu['vector_bits']} bits, "
            f"{cpu['num_cores']} threads) as {about['name']} under the key {key}; Ctrl-C ends it"
        )

    serve(Tracker.read(address, key), host, port, threads, ready)
