"""Snapshots of a job, as the dashboard shows it. Read ``job`` first."""
