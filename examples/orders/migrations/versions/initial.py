"""The tables, as ``alembic revision --autogenerate`` wrote them.

Revision ID: 0001
Revises:
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

# revision identifiers, used by Alembic.
revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Upgrade schema."""
    op.create_table(
        "orders",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("customer", sa.String(length=64), nullable=False),
        sa.Column("total", sa.Numeric(precision=10, scale=2), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "outbox_event",
        sa.Column("id", mysql.BIGINT(unsigned=True), autoincrement=True, nullable=False),
        sa.Column(
            "event_id",
            sa.String(length=64)
            .with_variant(
                mysql.VARCHAR(charset="utf8mb4", collation="utf8mb4_bin", length=64), "mariadb"
            )
            .with_variant(
                mysql.VARCHAR(charset="utf8mb4", collation="utf8mb4_bin", length=64), "mysql"
            ),
            nullable=False,
        ),
        sa.Column(
            "aggregate_type",
            sa.String(length=64)
            .with_variant(
                mysql.VARCHAR(charset="utf8mb4", collation="utf8mb4_bin", length=64), "mariadb"
            )
            .with_variant(
                mysql.VARCHAR(charset="utf8mb4", collation="utf8mb4_bin", length=64), "mysql"
            ),
            nullable=False,
        ),
        sa.Column(
            "aggregate_id",
            sa.String(length=64)
            .with_variant(
                mysql.VARCHAR(charset="utf8mb4", collation="utf8mb4_bin", length=64), "mariadb"
            )
            .with_variant(
                mysql.VARCHAR(charset="utf8mb4", collation="utf8mb4_bin", length=64), "mysql"
            ),
            nullable=False,
        ),
        sa.Column(
            "event_type",
            sa.String(length=128)
            .with_variant(
                mysql.VARCHAR(charset="utf8mb4", collation="utf8mb4_bin", length=128), "mariadb"
            )
            .with_variant(
                mysql.VARCHAR(charset="utf8mb4", collation="utf8mb4_bin", length=128), "mysql"
            ),
            nullable=False,
        ),
        sa.Column("payload", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("headers", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("status", mysql.TINYINT(), server_default=sa.text("0"), nullable=False),
        sa.Column("retry_count", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("next_retry_time", mysql.DATETIME(fsp=6), nullable=True),
        sa.Column("last_error", sa.String(length=512), nullable=True),
        sa.Column(
            "created_at",
            mysql.DATETIME(fsp=6),
            server_default=sa.text("(UTC_TIMESTAMP(6))"),
            nullable=False,
        ),
        sa.Column(
            "updated_at",
            mysql.DATETIME(fsp=6),
            server_default=sa.text("(UTC_TIMESTAMP(6))"),
            nullable=False,
        ),
        sa.Column("sent_at", mysql.DATETIME(fsp=6), nullable=True),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("event_id", name="uk_event_id"),
        mariadb_default_charset="utf8mb4",
        mariadb_engine="InnoDB",
        mysql_default_charset="utf8mb4",
        mysql_engine="InnoDB",
    )
    op.create_index(
        "idx_status_aggregate",
        "outbox_event",
        ["status", "aggregate_type", "aggregate_id"],
        unique=False,
    )
    op.create_index("idx_status_created", "outbox_event", ["status", "created_at"], unique=False)
    op.create_index(
        "idx_status_next_retry", "outbox_event", ["status", "next_retry_time"], unique=False
    )
    op.create_table(
        "outbox_sequence",
        sa.Column(
            "aggregate_type",
            sa.String(length=64)
            .with_variant(
                mysql.VARCHAR(charset="utf8mb4", collation="utf8mb4_bin", length=64), "mariadb"
            )
            .with_variant(
                mysql.VARCHAR(charset="utf8mb4", collation="utf8mb4_bin", length=64), "mysql"
            ),
            nullable=False,
        ),
        sa.Column(
            "aggregate_id",
            sa.String(length=64)
            .with_variant(
                mysql.VARCHAR(charset="utf8mb4", collation="utf8mb4_bin", length=64), "mariadb"
            )
            .with_variant(
                mysql.VARCHAR(charset="utf8mb4", collation="utf8mb4_bin", length=64), "mysql"
            ),
            nullable=False,
        ),
        sa.Column("last_seq", mysql.BIGINT(unsigned=True), nullable=False),
        sa.PrimaryKeyConstraint("aggregate_type", "aggregate_id"),
        mariadb_default_charset="utf8mb4",
        mariadb_engine="InnoDB",
        mysql_default_charset="utf8mb4",
        mysql_engine="InnoDB",
    )


def downgrade() -> None:
    """Downgrade schema."""
    op.drop_table("outbox_sequence")
    op.drop_index("idx_status_next_retry", table_name="outbox_event")
    op.drop_index("idx_status_created", table_name="outbox_event")
    op.drop_index("idx_status_aggregate", table_name="outbox_event")
    op.drop_table("outbox_event")
    op.drop_table("orders")
