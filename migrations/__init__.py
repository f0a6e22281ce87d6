"""Alembic revisions of the service's database, the same for SQLite and Postgres.

A released revision is never edited; a new one is added behind it.
"""
