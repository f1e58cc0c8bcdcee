"""Play the incident and print what a person on call sees and types; `--pictures FOLDER` keeps pictures of the page.

Exit status: 0 if every order was charged once and every verdict is on record, 1 if not.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import click

from celery_idempotent import Status, open_store
from lab import tether
from lab.embedded import EmbeddedRedis
from lab.fleet import until
from lab.folders import temporary_folder
from lab.incident.provider import TRANSFER

ORDERS = 200
_PATIENCE = 120.0
_CARD = "card/"


@click.command(help=__doc__)
@click.option("--pictures", type=click.Path(path_type=Path), help="A folder for pictures of the page.")
def main(pictures: Path | None) -> None:
    """Play all of it."""
    tether.unwind_on_signals()
    with temporary_folder() as folder, _scene(folder) as scene:
        _play(scene, pictures)


class _Scene:
    """A provider, a store, a broker, a worker, and the shell of the person on call."""

    def __init__(self, folder: Path, environ: Mapping[str, str], store_url: str) -> None:
        self.folder = folder
        self.environ = environ
        self.store = open_store(store_url)
        self._worker: subprocess.Popen[bytes] | None = None

    def start_worker(self) -> None:
        """As a supervisor does it; every order has a thread of its own."""
        arguments = f"-A lab.incident.shop worker --pool threads --concurrency {ORDERS} --loglevel WARNING"
        with (self.folder / "worker.log").open("ab") as log:
            self._worker = tether.start(
                "celery", *arguments.split(), "--without-gossip", "--without-mingle", log=log, env=self.environ
            )

    def kill_worker(self) -> None:
        """As the kernel does it, short of memory."""
        if self._worker is not None:
            tether.kill(self._worker)
        self._worker = None

    def publish(self, orders: Sequence[str]) -> None:
        """As the shop does it."""
        code = f"from lab.incident.shop import charge\nfor order in {list(orders)!r}: charge.delay(order, 4200)"
        subprocess.run([sys.executable, "-c", code], env={**os.environ, **self.environ}, check=True)

    def types(self, command: str, *, shown: int = 12) -> str:
        """What the person on call types, and the first lines of what they see."""
        click.secho(f"$ celery -A shop idempotency {command}", bold=True)
        found = subprocess.run(
            [sys.executable, "-m", "celery", "-A", "lab.incident.shop", "idempotency", *shlex.split(command)],
            env={**os.environ, **self.environ, "COLUMNS": "110"},
            capture_output=True,
            text=True,
            check=True,
        )
        lines = found.stdout.rstrip().splitlines()
        click.echo("\n".join(lines[:shown]) + (f"\n... {len(lines) - shown} more lines" if len(lines) > shown else ""))
        click.echo()
        return found.stdout

    def asks_provider(self, path: str, *, post: bool = False) -> tuple[int, Any]:
        """What the provider answers."""
        return _answer(Request(f"{self.environ['SHOP_PROVIDER']}{path}", method="POST" if post else "GET"))

    def firing(self) -> list[str]:
        """What each alert that fires says."""
        _, answer = _answer(Request(f"{self.environ['SHOP_ALERTS']}/api/v1/alerts"))
        alerts = answer["data"]["alerts"] if answer else []
        return [
            f"{each['labels']['severity'].upper()} {each['labels']['alertname']}: {each['annotations']['summary']}"
            for each in alerts
            if each["state"] == "firing"
        ]

    def statuses(self) -> Counter[Status]:
        """How many records are in each status."""
        return Counter(each.status for each in self.store.scan())


def _answer(request: Request) -> tuple[int, Any]:
    try:
        with urlopen(request) as answer:
            return answer.status, json.load(answer)
    except OSError as error:
        return getattr(error, "code", 0), None


@contextmanager
def _scene(folder: Path) -> Iterator[_Scene]:
    with ExitStack() as running, EmbeddedRedis() as redis:
        ports = [running.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        provider_port, metrics_port, alerts_port = (each.getsockname()[1] for each in ports)
        for each in ports:
            each.close()
        provider = tether.start("lab.incident.provider", str(provider_port))
        running.callback(tether.kill, provider)
        alerts = _watching(folder, metrics_port, alerts_port)
        running.callback(tether.kill, alerts)
        environ = {
            "SHOP_PROVIDER": f"http://127.0.0.1:{provider_port}",
            "SHOP_METRICS": str(metrics_port),
            "SHOP_ALERTS": f"http://127.0.0.1:{alerts_port}",
            "SHOP_BROKER": redis.url,
            "SHOP_STORE": f"{redis.url.removesuffix('0')}1",
        }
        scene = _Scene(folder, environ, environ["SHOP_STORE"])
        running.callback(scene.kill_worker)
        until(lambda: scene.asks_provider("/charges")[0] == 200, "the provider", _PATIENCE)
        yield scene


def _watching(folder: Path, scraped: int, port: int) -> subprocess.Popen[bytes]:
    """Prometheus with the rules that are shipped, which asks the worker once a second."""
    rules = Path(__file__).parents[2] / "docs" / "operations" / "alerts.yml"
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(rules)],
        "scrape_configs": [{"job_name": "shop", "static_configs": [{"targets": [f"127.0.0.1:{scraped}"]}]}],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))  # YAML takes JSON
    return tether.start_program(
        "prometheus",
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/prometheus",
        f"--web.listen-address=127.0.0.1:{port}",
    )


def _tell(text: str) -> None:
    click.secho(f"\n{time.strftime('%H:%M:%S')}  {text}", fg="yellow")


def _play(scene: _Scene, pictures: Path | None) -> None:
    cards = [f"{_CARD}{number}" for number in range(1000, 1000 + ORDERS * 3 // 4)]
    transfers = [f"{TRANSFER}{number}" for number in range(1000, 1000 + ORDERS // 4)]
    scene.start_worker()
    scene.asks_provider("/hang", post=True)
    _tell(f"The provider hangs. {ORDERS} orders come in, and every one of them waits for an answer.")
    scene.publish([*cards, *transfers])
    until(lambda: scene.statuses()[Status.IN_PROGRESS] == ORDERS, "every order to be begun", _PATIENCE)
    until(lambda: len(scene.asks_provider("/charges")[1]["charges"]) == len(cards), "the cards' charges", _PATIENCE)

    _tell("The worker, full of waiting orders, runs out of memory and is killed. A supervisor starts it again.")
    scene.kill_worker()
    scene.start_worker()
    until(lambda: scene.statuses()[Status.UNKNOWN] == ORDERS, "every order to be UNKNOWN", _PATIENCE)
    until(lambda: bool(scene.firing()), "an alert", _PATIENCE)
    _tell(
        "Nothing is charged again: under on_takeover='refuse' a person decides. An alert fires, and somebody is paged:"
    )
    click.echo("\n".join(sorted(scene.firing())) + "\n")
    scene.types("stats")
    scene.types("list --status unknown --limit 5")
    if pictures is not None:
        _photograph(scene, pictures, "incident-overview")

    _tell("Which of them happened? The provider knows them by their effect keys.")
    found: dict[str, Counter[int]] = {_CARD: Counter(), TRANSFER: Counter()}
    for order in (cards[0], transfers[0]):
        key = scene.types(f"effect-key {order} charge").strip()
        status, answer = scene.asks_provider(f"/charges/{key}")
        click.echo(f"$ curl {scene.environ['SHOP_PROVIDER']}/charges/{key}\n{status} {json.dumps(answer)}\n")
    listed = json.loads(scene.types(f"list --status unknown --limit {ORDERS} --json", shown=3))
    for each in listed:
        kind = _CARD if each["label"].startswith(_CARD) else TRANSFER
        found[kind][scene.asks_provider(f"/charges/{_effect_key(each['key'])}")[0]] += 1
    click.echo(
        f"The provider's answers, by kind of order: { {kind: dict(counted) for kind, counted in found.items()} }"
    )

    _tell("All cards were charged, and no transfer was. Two verdicts, with a reason.")
    scene.asks_provider("/answer", post=True)
    why = "--by ann --reason 'INC-42: asked the provider by effect key'"
    scene.types(f"resolve --label '{_CARD}*' --status unknown --completed null {why} --dry-run", shown=4)
    scene.types(f"resolve --label '{_CARD}*' --status unknown --completed null {why} --yes")
    scene.types(f"resolve --label '{TRANSFER}*' --status unknown --rerun {why} --yes")
    _tell("The transfers are published again; a second message for every card is answered without a charge.")
    scene.publish([*transfers, *cards])
    until(lambda: scene.statuses()[Status.COMPLETED] == ORDERS, "every order to be completed", _PATIENCE)

    _tell("Later, the auditor.")
    scene.types(f"show {cards[0]}", shown=40)
    if pictures is not None:
        _photograph(scene, pictures, "incident-record", f"record?key={listed[0]['key']}")
    _judge(scene, [*cards, *transfers])


def _effect_key(key: str) -> str:
    from celery_idempotent.engine.claim import effect_key

    return effect_key(key, "charge")


def _photograph(scene: _Scene, pictures: Path, name: str, path: str = "") -> None:
    """What the page shows now."""
    from selenium.webdriver import Chrome, ChromeOptions, ChromeService

    pictures.mkdir(parents=True, exist_ok=True)
    arguments = ("-m", "celery", "-A", "lab.incident.shop", "idempotency", "web", "--port", "0", "--write")
    served = subprocess.Popen(
        [sys.executable, *arguments], env={**os.environ, **scene.environ}, stdout=subprocess.PIPE, text=True
    )
    options = ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for each in ("--headless=new", "--no-sandbox", "--window-size=1100,900", "--hide-scrollbars"):
        options.add_argument(each)
    try:
        assert served.stdout is not None
        link = served.stdout.readline().strip()
        with Chrome(options, ChromeService(shutil.which("chromedriver"))) as browser:
            browser.get(link)
            browser.get(f"{link.partition('?')[0]}{path}")
            browser.save_screenshot(str(pictures / f"{name}.png"))
    finally:
        served.terminate()
        served.wait()


def _judge(scene: _Scene, orders: Sequence[str]) -> None:
    charges = Counter(scene.asks_provider("/charges")[1]["charges"])
    judged = sum(1 for each in scene.store.scan() if each.verdict)
    click.echo(f"{len(charges)} orders charged, {sum(charges.values())} charges, {judged} verdicts on record")
    if charges != Counter(orders) or judged != len(orders):
        sys.exit(1)


if __name__ == "__main__":
    main()
