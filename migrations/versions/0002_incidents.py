"""Incidents of engines, and the tasks they hit."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply the revision."""
    op.create_table(
        "incidents",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("arrival", sa.String(length=64), nullable=False),
        sa.Column("worker_id", sa.String(length=64), nullable=False),
        sa.Column("model", sa.String(length=512), nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("phase", sa.Text(), nullable=False),
        sa.Column("blame", sa.String(length=32), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("tried", sa.JSON(), nullable=False),
        sa.Column("processes_left", sa.BigInteger(), nullable=False),
        sa.Column("gpu_bytes_left", sa.BigInteger(), nullable=True),
        sa.Column("happened_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("reported_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("evidence", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("arrival"),
    )
    op.create_index("ix_incidents_worker", "incidents", ["worker_id", "arrival"], unique=False)
    op.create_table(
        "incident_tasks",
        sa.Column("incident_id", sa.String(length=64), nullable=False),
        sa.Column("task_id", sa.String(length=64), nullable=False),
        sa.Column("job_id", sa.String(length=64), nullable=True),
        sa.ForeignKeyConstraint(["incident_id"], ["incidents.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("incident_id", "task_id"),
    )
    op.create_index("ix_incident_tasks_job", "incident_tasks", ["job_id"], unique=False)


def downgrade() -> None:
    """Undo the revision."""
    op.drop_index("ix_incident_tasks_job", "incident_tasks")
    op.drop_table("incident_tasks")
    op.drop_index("ix_incidents_worker", "incidents")
    op.drop_table("incidents")
