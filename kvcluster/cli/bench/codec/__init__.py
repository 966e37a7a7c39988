"""`kvcluster bench codec`: how fast pages are encoded and decoded, and how wrong they are afterwards."""
