"""Settings of replicas that train apart."""

SGD = {"name": "sgd", "lr": 0.1, "momentum": 0.0, "weight_decay": 0.0, "clip": 0.0}
