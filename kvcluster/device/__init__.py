"""Devices: memory that the CPU does not address. The interface that kvcluster needs of one (device.py), and a twin
(software_twin.py), which proves without a GPU that all accesses are ordered."""
