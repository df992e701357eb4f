"""The policy: FSDP2 ranks that score and train it. `policy.interfaces` has its interfaces."""
