"""`kvcluster bench tiers`: what an encoded tier costs and gives, on a real cluster: loads out of it, and stores beside
it."""
