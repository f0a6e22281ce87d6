"""The database: tables, connections, migrations and the clock of leases."""
