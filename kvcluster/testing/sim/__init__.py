"""The simulator: the real cores under simulated clocks, networks, memories and faults, all drawn from one seed.

    kernel     time, processes that stop and die, scripts       scenario   what a seed stands for
    network    questions and connections between nodes          workload   what engines want
    driver     what runtime/driver.py does                      faults     what goes wrong
    coordinator, shard, sessions, memory     the shells         oracle     the judge, who sees everything
    worker     what kvcluster/client does                       liveness   the second phase: all comes to rest
    content    the right bytes of every page                    bugs       planted, to show that the oracle sees
    world      one seed's cluster                               runner     many seeds, and how a failure is told

`kvcluster simulate` runs it; docs/simulator.md says how to read what it prints.
"""
