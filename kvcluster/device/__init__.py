"""Devices whose memory the CPU does not address: what kvcluster needs of one (device.py), and a twin (software_twin.py)
that proves, without a card, that everything is done in order."""
