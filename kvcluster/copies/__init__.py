"""Copies between pages and blocks as batches, which an executor carries out and verifies: the way in which bytes go."""
