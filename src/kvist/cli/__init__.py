"""The command line: thin commands over the library. Nothing here is needed to use kvist from Python."""
