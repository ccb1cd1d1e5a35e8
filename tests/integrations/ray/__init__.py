"""``executor="ray"``: the executors' contract, byte identity, lost nodes, actors, the probe."""
