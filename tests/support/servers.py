"""Databases as single tests need them."""

from __future__ import annotations

from dev.mysql import MySQL


class BareMySQL(MySQL):
    """No GTIDs (the default until 8.4; 9.x has them on): positions are file and offset."""

    def flags(self) -> list[str]:
        return [
            "--mysqlx=OFF",
            "--local-infile=ON",
            "--gtid-mode=OFF",
            "--enforce-gtid-consistency=OFF",
        ]
