"""The draft tree, how its nodes are scored, and the builders that grow it."""
