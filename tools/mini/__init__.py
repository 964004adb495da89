"""The shipped model: a grammar of one small world, and the script that trains on it."""
