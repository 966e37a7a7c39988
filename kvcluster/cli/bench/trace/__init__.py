"""`kvcluster bench trace`: a published trace of requests, replayed through the real coordinator and shards."""
