"""A page on which people see every operation and give verdicts, as an ASGI app; needs the extra ``web``.

It needs neither a build step nor JavaScript, and keeps nothing itself: all that it shows stands in the store.
"""

import ipaddress
import logging
import secrets
import socket
from typing import TYPE_CHECKING

import click
from celery import Celery

from celery_idempotent.errors import IdempotencyError, PolicyError
from celery_idempotent.printable import not_installed
from celery_idempotent.troubleshooting import with_link

if TYPE_CHECKING:
    from starlette.types import ASGIApp

SHORTEST_TOKEN = 16
"""Characters of a token; nothing counts how often somebody guesses."""


def create_app(app: Celery, *, token: str, write: bool = False) -> "ASGIApp":
    """The page of ``app``'s records, to be served alone or mounted under a prefix.

    The app's tasks are imported: their policies decide what a verdict means. One token is one right: give those who may
    only look an app of their own, with another token.

    Args:
        app: The Celery app.
        token: What people and programs must know to see anything; at least 16 characters.
        write: Whether they may give verdicts.

    Raises:
        PolicyError: The token is too short, or ``idempotency_store`` is not set.
        ImportError: The extra ``web`` is not installed.
    """
    if len(token) < SHORTEST_TOKEN:
        raise PolicyError("token", "'...'", f"must have at least {SHORTEST_TOKEN} characters")
    try:
        from celery_idempotent.contrib.web.pages import page_of
    except ModuleNotFoundError as error:
        raise ImportError(_not_installed(error)) from error
    app.loader.import_default_modules()
    return page_of(app, token, write=write)


def _not_installed(error: ModuleNotFoundError) -> str:
    return with_link(not_installed(error, "web"), "errors#package-missing")


@click.command()
@click.option("--bind", default="127.0.0.1", show_default=True, metavar="ADDRESS", help="Where to listen.")
@click.option("--port", default=5557, show_default=True, type=click.IntRange(0, 65535), metavar="N", help="0: any.")
@click.option("--write", is_flag=True, help="Let people give verdicts; without, they may only look.")
@click.option(
    "--token",
    envvar="IDEMPOTENCY_WEB_TOKEN",
    metavar="TOKEN",
    help="What people must know to come in; default: the variable IDEMPOTENCY_WEB_TOKEN, or else one that is generated "
    "and printed. Others on the machine can read a command line, and not a variable.",
)
@click.pass_context
def web(context: click.Context, bind: str, port: int, write: bool, token: str | None) -> None:
    """Serve a page on which people see every operation.

    The page of one process, for those who have its token. An address that others can reach needs a token of your own.
    A generated one is printed to the log, where others may read it, and changes with every start.
    """
    if token is None and not _is_local(bind):
        raise click.UsageError(
            f"{bind} can be reached by others; set IDEMPOTENCY_WEB_TOKEN, and put a proxy with TLS before the page"
        )
    is_generated = token is None
    token = token or secrets.token_urlsafe(24)
    try:
        import uvicorn

        page = create_app(context.obj.app, token=token, write=write)
    except ModuleNotFoundError as error:
        raise click.ClickException(_not_installed(error)) from error
    except (IdempotencyError, ImportError) as error:
        raise click.ClickException(str(error)) from error
    # Other commands tell of verdicts themselves, and have the log leave them out.
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    try:
        family, *_, address = socket.getaddrinfo(bind, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address[:2], family=family)
    except OSError as error:
        raise click.ClickException(f"cannot listen on {bind}, port {port}: {error}") from error
    with listener:
        # Its connections inherit it. asyncio sets it only on sockets that name their protocol, which these do not; an
        # answer is written in two parts, and the second would wait for the browser to acknowledge the first.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        host, port = listener.getsockname()[:2]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}/"
        click.echo(f"{url}?token={token}" if is_generated else f"{url} (log in with your token)")
        if not _is_local(bind):
            click.echo("Warning: without TLS before it, others on the way can read the token.", err=True)
        config = uvicorn.Config(page, access_log=False, log_level="warning", server_header=False)
        uvicorn.Server(config).run(sockets=[listener])


def _is_local(bind: str) -> bool:
    try:
        return ipaddress.ip_address(bind).is_loopback
    except ValueError:
        return bind == "localhost"
