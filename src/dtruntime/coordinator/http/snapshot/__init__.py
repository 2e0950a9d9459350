"""A job at one moment, as the dashboard shows it. Read ``job`` first."""
