"""How fast workers and tasks go, and how many incidents there were."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply the revision."""
    op.add_column("workers", sa.Column("figures", sa.JSON(), nullable=True))
    op.add_column("tasks", sa.Column("tokens_per_second", sa.Double(), nullable=True))
    op.create_table(
        "incident_counts",
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("count", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("kind"),
    )
    op.execute("INSERT INTO incident_counts (kind, count) SELECT kind, count(*) FROM incidents GROUP BY kind")


def downgrade() -> None:
    """Undo the revision."""
    op.drop_table("incident_counts")
    # Not in batch mode: to copy `tasks` would take the row errors with it, by their foreign key.
    op.drop_column("tasks", "tokens_per_second")
    op.drop_column("workers", "figures")
