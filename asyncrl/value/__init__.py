"""The critic: what a state is worth, as a sharded model beside the policy."""
