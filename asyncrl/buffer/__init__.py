"""The bounded replay buffer: tickets, leases, and the ledger of the fates of all groups. Pure."""
