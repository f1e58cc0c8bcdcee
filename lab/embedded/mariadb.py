"""MariaDB on this machine: Debian's package, or another that is installed."""

import getpass
import shutil
import socket
import subprocess
from pathlib import Path

from lab.embedded.server import HOST, Server

PATH = "/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin"


class EmbeddedMariaDB(Server):
    """A private MariaDB with durable commits and an empty database `idempotency`."""

    @staticmethod
    def missing() -> str | None:
        found = shutil.which("mariadbd", path=PATH) and shutil.which("mariadb-install-db", path=PATH)
        return None if found else "run: apt-get install mariadb-server"

    @staticmethod
    def version() -> str:
        said = subprocess.run([_program("mariadbd"), "--version"], check=True, capture_output=True, text=True).stdout
        return said.split(" Ver ")[1].split()[0]

    @property
    def url(self) -> str:
        return f"mysql+pymysql://root@{HOST}:{self.port}/idempotency"

    def prepare(self) -> None:
        options = ("--auth-root-authentication-method=normal", "--skip-test-db")
        command = [_program("mariadb-install-db"), *self._place, *options]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._first.write_text("CREATE DATABASE IF NOT EXISTS idempotency CHARACTER SET utf8mb4;\n")

    def launch(self) -> subprocess.Popen[bytes]:
        return self.start_program(
            _program("mariadbd"),
            *self._place,
            f"--port={self.port}",
            f"--bind-address={HOST}",
            f"--socket={self.folder}/socket",
            f"--pid-file={self.folder}/pid",
            f"--init-file={self._first}",
            "--innodb-flush-log-at-trx-commit=1",
            "--innodb-log-file-size=16M",
            "--performance-schema=off",
        )

    def is_ready(self) -> bool:
        """Whether it listens; it answers when it has recovered and the database is there."""
        with socket.socket(socket.AF_UNIX) as link:
            return link.connect_ex(f"{self.folder}/socket") == 0

    @property
    def _first(self) -> Path:
        """What it executes at each start, before it answers anybody."""
        return self.folder / "first.sql"

    @property
    def _place(self) -> tuple[str, ...]:
        # A folder for temporary tables, too: a server that starts deletes those of all others in the same.
        data, temporary = f"--datadir={self.folder}/data", f"--tmpdir={self.folder}"
        return ("--no-defaults", data, temporary, f"--user={getpass.getuser()}")


def _program(name: str) -> str:
    return str(shutil.which(name, path=PATH))
