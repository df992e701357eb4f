"""The coordinator: the one process of a run that holds the replay buffer and knows the run's deployments and replicas.

    client = CoordinatorClient.over_ray(handle, timeout_s=30.0)
    reservation = await client.call(Coordinator.reserve, "replica-1", version, 4, wait_s=20.0)

Other processes call the methods of two classes: `Coordinator` and `Registry`. The client takes the method itself, so
mypy checks the arguments of a call.
"""
