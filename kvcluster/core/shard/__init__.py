"""A shard: its pages and where they lie, who reads and writes them, and the orders that it carries out."""
