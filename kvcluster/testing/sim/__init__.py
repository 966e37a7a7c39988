"""The simulator: the real cores under simulated clocks, networks, memories and faults, all drawn from one seed."""
