"""Tables of data sets, jobs, tasks and workers."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply the revision."""
    op.create_table(
        "datasets",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("rows", sa.BigInteger(), nullable=False),
        sa.Column("bad_rows", sa.BigInteger(), nullable=False),
        sa.Column("complete", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("idempotency_key", sa.String(length=255), nullable=True),
        sa.Column("request_digest", sa.String(length=64), nullable=False),
        sa.Column("dataset_id", sa.String(length=64), nullable=False),
        sa.Column("dataset_sha256", sa.String(length=64), nullable=False),
        sa.Column("model", sa.String(length=512), nullable=False),
        sa.Column("num_layers", sa.BigInteger(), nullable=False),
        sa.Column("hidden_size", sa.BigInteger(), nullable=False),
        sa.Column("layers", sa.JSON(), nullable=False),
        sa.Column("preset", sa.String(length=32), nullable=True),
        sa.Column("final", sa.String(length=32), nullable=False),
        sa.Column("max_tokens", sa.BigInteger(), nullable=True),
        sa.Column("overflow", sa.String(length=32), nullable=False),
        sa.Column("loss_mask", sa.String(length=32), nullable=False),
        sa.Column("shard_bytes", sa.BigInteger(), nullable=False),
        sa.Column("metadata", sa.JSON(), nullable=False),
        sa.Column("tokens_generation", sa.BigInteger(), nullable=True),
        sa.Column("pins", sa.JSON(), nullable=True),
        sa.Column("pins_key", sa.String(length=64), nullable=True),
        sa.Column("engine", sa.JSON(), nullable=False),
        sa.Column("tasks_open", sa.BigInteger(), nullable=False),
        sa.Column("rows_total", sa.BigInteger(), nullable=True),
        sa.Column("tokens_total", sa.BigInteger(), nullable=True),
        sa.Column("bytes_total", sa.BigInteger(), nullable=True),
        sa.Column("shards_total", sa.BigInteger(), nullable=True),
        sa.Column("rows_done", sa.BigInteger(), nullable=False),
        sa.Column("tokens_done", sa.BigInteger(), nullable=False),
        sa.Column("bytes_done", sa.BigInteger(), nullable=False),
        sa.Column("shards_done", sa.BigInteger(), nullable=False),
        sa.Column("row_errors", sa.BigInteger(), nullable=False),
        sa.Column("tokens_before", sa.BigInteger(), nullable=False),
        sa.Column("failure_code", sa.String(length=64), nullable=True),
        sa.Column("failure_reason", sa.Text(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("planning_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("running_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("finalizing_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("cancelling_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("succeeded_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("failed_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("cancelled_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("idempotency_key"),
    )
    op.create_index("ix_jobs_dataset", "jobs", ["dataset_id"], unique=False)
    op.create_index("ix_jobs_state", "jobs", ["state", "id"], unique=False)

    op.create_table(
        "models",
        sa.Column("name", sa.String(length=512), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("num_layers", sa.BigInteger(), nullable=False),
        sa.Column("hidden_size", sa.BigInteger(), nullable=False),
        sa.Column("max_row_tokens", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name"),
    )
    op.create_index("ix_models_path", "models", ["path"], unique=False)

    op.create_table(
        "workers",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("version", sa.Text(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("loaded_model", sa.Text(), nullable=True),
        sa.Column("status", sa.Text(), nullable=True),
        sa.Column("registered_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("seen_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("seen_deadline", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "dataset_errors",
        sa.Column("dataset_id", sa.String(length=64), nullable=False),
        sa.Column("row_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("code", sa.String(length=64), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["dataset_id"], ["datasets.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("dataset_id", "row_id"),
    )
    op.create_table(
        "tasks",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("job_id", sa.String(length=64), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("index", sa.BigInteger(), nullable=False),
        sa.Column("model", sa.String(length=512), nullable=False),
        sa.Column("pins_key", sa.String(length=64), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("secret", sa.String(length=64), nullable=False),
        sa.Column("worker_id", sa.String(length=64), nullable=True),
        sa.Column("request_id", sa.String(length=64), nullable=True),
        sa.Column("deadline", sa.Double(), nullable=False),
        sa.Column("attempts", sa.BigInteger(), nullable=False),
        sa.Column("expiries", sa.BigInteger(), nullable=False),
        sa.Column("rows_done", sa.BigInteger(), nullable=False),
        sa.Column("tokens_done", sa.BigInteger(), nullable=False),
        sa.Column("phase", sa.Text(), nullable=False),
        sa.Column("first_row", sa.BigInteger(), nullable=False),
        sa.Column("rows", sa.BigInteger(), nullable=False),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=True),
        sa.Column("committed_bytes", sa.BigInteger(), nullable=True),
        sa.Column("committed_rows", sa.BigInteger(), nullable=True),
        sa.Column("committed_tokens", sa.BigInteger(), nullable=True),
        sa.Column("committed_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("failure_code", sa.String(length=64), nullable=True),
        sa.Column("failure_reason", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index(
        "ix_tasks_deadline",
        "tasks",
        ["deadline"],
        unique=False,
        sqlite_where=sa.text("state = 'leased'"),
        postgresql_where=sa.text("state = 'leased'"),
    )
    op.create_index(
        "ix_tasks_ready",
        "tasks",
        ["kind", "model", "pins_key", "job_id", "index"],
        unique=False,
        sqlite_where=sa.text("state = 'ready'"),
        postgresql_where=sa.text("state = 'ready'"),
    )
    op.create_index("uq_tasks_place", "tasks", ["job_id", "kind", "index"], unique=True)
    op.create_index(
        "uq_tasks_request",
        "tasks",
        ["worker_id", "request_id"],
        unique=True,
        sqlite_where=sa.text("state = 'leased'"),
        postgresql_where=sa.text("state = 'leased'"),
    )

    op.create_table(
        "worker_models",
        sa.Column("worker_id", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=512), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("pins_key", sa.String(length=64), nullable=False),
        sa.ForeignKeyConstraint(["worker_id"], ["workers.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("worker_id", "name"),
    )
    op.create_table(
        "row_errors",
        sa.Column("task_id", sa.String(length=64), nullable=False),
        sa.Column("generation", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("row_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("job_id", sa.String(length=64), nullable=False),
        sa.Column("code", sa.String(length=64), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["task_id"], ["tasks.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("task_id", "generation", "row_id"),
    )
    op.create_index("ix_row_errors_job", "row_errors", ["job_id", "row_id"], unique=False)


def downgrade() -> None:
    """Undo the revision."""
    op.drop_index("ix_row_errors_job", "row_errors")

    op.drop_table("row_errors")
    op.drop_table("worker_models")
    op.drop_index(
        "uq_tasks_request",
        "tasks",
        sqlite_where=sa.text("state = 'leased'"),
        postgresql_where=sa.text("state = 'leased'"),
    )
    op.drop_index("uq_tasks_place", "tasks")
    op.drop_index(
        "ix_tasks_ready", "tasks", sqlite_where=sa.text("state = 'ready'"), postgresql_where=sa.text("state = 'ready'")
    )
    op.drop_index(
        "ix_tasks_deadline",
        "tasks",
        sqlite_where=sa.text("state = 'leased'"),
        postgresql_where=sa.text("state = 'leased'"),
    )

    op.drop_table("tasks")
    op.drop_table("dataset_errors")
    op.drop_table("workers")
    op.drop_index("ix_models_path", "models")

    op.drop_table("models")
    op.drop_index("ix_jobs_state", "jobs")
    op.drop_index("ix_jobs_dataset", "jobs")

    op.drop_table("jobs")
    op.drop_table("datasets")
