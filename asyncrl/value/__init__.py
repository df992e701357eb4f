"""The critic: a sharded model beside the policy that predicts the value of states."""
