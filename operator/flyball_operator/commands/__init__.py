"""The commands for users, one module each; ``flyball_operator.cli`` has the list."""
