"""Several hosts simulated on this machine: network namespaces, joined by a relay that delays every packet."""
