"""``python -m tests.support.strict TABLE SECONDS SEED HIDDEN KEY...``: one inserting service that
forgives the database nothing.

As ``Load`` it takes the aggregate's row lock first and numbers its events from it, at the server's
default isolation. The first error of any kind ends it with a traceback. Prints the longest
transaction in seconds. ``HIDDEN`` (0 or 1): rows that the binlog does not show.
"""

from __future__ import annotations

import os
import random
import sys
import time

from sqlalchemy.engine import make_url

from tests.support.sql import INSERT, Database, row


def main() -> None:
    table, seconds, seed, hidden, *keys = sys.argv[1:]
    chance = random.Random(int(seed))
    database = Database(make_url(os.environ["CDC_RELAY_DATABASE_URL"]))
    longest, until = 0.0, time.monotonic() + float(seconds)
    with database.connect() as connection, connection.cursor() as cursor:
        if hidden == "1":
            cursor.execute("SET sql_log_bin = 0")
        while time.monotonic() < until:
            begun = time.monotonic()
            key, count = chance.choice(keys), chance.choice((1, 1, 2, 5))
            cursor.execute("UPDATE account SET n = n + %s WHERE id = %s", (count, key))
            cursor.execute("SELECT n FROM account WHERE id = %s", (key,))
            [last] = cursor.fetchone() or ()
            cursor.executemany(
                INSERT.format(table=table),
                [row(key, {"n": number}) for number in range(last - count + 1, last + 1)],
            )
            connection.rollback() if chance.random() < 0.1 else connection.commit()
            longest = max(longest, time.monotonic() - begun)
            time.sleep(0.01)
    print(f"{longest:.3f}")


if __name__ == "__main__":
    main()
