"""Links between processes, and the mailbox in which their messages arrive."""
