"""Moving page bytes between processes: one seam, several transports (base.py)."""
