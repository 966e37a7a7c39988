"""Moving page bytes between processes: one interface, several transports (base.py)."""
