"""MariaDB on this machine: Debian's package, or another that is installed."""

from __future__ import annotations

import getpass
import shutil
import socket
import subprocess

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

    def launch(self) -> subprocess.Popen[bytes]:
        return self.start_program(
            _program("mariadbd"),
            *self._place,
            f"--port={self.port}",
            f"--bind-address={HOST}",
            f"--socket={self.folder}/socket",
            f"--pid-file={self.folder}/pid",
            "--innodb-flush-log-at-trx-commit=1",
            "--innodb-log-file-size=16M",
            "--performance-schema=off",
        )

    def is_ready(self) -> bool:
        """Whether this server takes connections; makes the database at the first."""
        import pymysql

        # A socket of our own, as PyMySQL forgets to close its own when nobody listens.
        link = socket.socket(socket.AF_UNIX)
        link.settimeout(5)
        connection = pymysql.connect(user="root", defer_connect=True)
        try:
            link.connect(f"{self.folder}/socket")
            connection.connect(link)
        except (OSError, pymysql.MySQLError):
            link.close()
            return False
        with connection, connection.cursor() as cursor:
            cursor.execute("CREATE DATABASE IF NOT EXISTS idempotency CHARACTER SET utf8mb4")
        return True

    @property
    def _place(self) -> tuple[str, ...]:
        # A folder for temporary tables, too: a server that starts deletes those of all others in the same.
        data, temporary = f"--datadir={self.folder}/data", f"--tmpdir={self.folder}"
        return ("--no-defaults", data, temporary, f"--user={getpass.getuser()}")


def _program(name: str) -> str:
    return str(shutil.which(name, path=PATH))
