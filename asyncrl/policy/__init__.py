"""The policy: FSDP2 ranks that score and train, behind the interfaces of `policy.interfaces`."""
