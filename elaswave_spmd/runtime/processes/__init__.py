"""Worker processes: the fork server that makes them, agents on other machines, and the watch over their deaths."""
