"""The simulator: the real cores under simulated clocks, networks, memories and faults, all drawn from one seed.

    network    questions and connections between nodes          scenario   what a seed stands for
    driver     a core's process, journalled and judged          workload   the requests of engines
    coordinator, shard, sessions                 the shells     faults     what goes wrong
    shard_storage, memory, disk                  a shard's bytes
    client_process, worker     what kvcluster/client does       liveness   the second phase: the cluster comes to rest
    sequence_worker, sequence_workload           workers with open sequences, and what their users do
    sequence_loads, resident_numbers             their loads, and the memory of their resident sets
    listener   a subscriber to KV events                        bugs       planted, to show that the oracles detect them
    content    the correct bytes of every page                  runner     runs many seeds and reports failures
    world      one seed's cluster                               phases     the run of a seed
    oracle, coordinator_oracle, sequence_oracle, evictions     the judges, which see everything
    surroundings                                 what processes need of their world

Time, processes and scripts are those of testing/kernel.py.

`kvcluster simulate` runs it; docs/simulator.md says how to read its output.
"""
