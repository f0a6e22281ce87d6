"""Data sets: upload, list, delete."""
