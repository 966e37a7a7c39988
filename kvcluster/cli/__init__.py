"""The command line. Each command is a module with `add(parsers)` and a function that returns the exit status."""
