"""The policy: FSDP2 ranks that compute log-probs and train the model. `policy.interfaces` has its interfaces."""
