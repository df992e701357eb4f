"""The learner's loop (lease, advantages, train, acknowledge, publish) and the records of its steps."""
