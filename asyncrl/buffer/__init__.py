"""The bounded replay buffer: tickets, leases, the ledger of the fates of all groups, and the members of the run."""
