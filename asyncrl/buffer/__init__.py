"""The bounded replay buffer: tickets, leases, the ledger of every group's fate, who is a member of the run."""
